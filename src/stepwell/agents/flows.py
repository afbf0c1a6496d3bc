"""Ready agents for BlackBoxAgentFlow: one question, a loop of tool calls, an external command.

    flow = BlackBoxAgentFlow(url, SingleTurn(messages=lambda s: s["question"], reward=is_right, temperature=1.0))

`messages` returns the conversation of a sample, or just the user's text. `reward`, sync or async, returns the reward
for a sample and the resulting text; without it the rollout stays unscored.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import orjson

from stepwell.agents.outcome import is_machine_fault
from stepwell.agents.rollout import Rollout, Sample, described, portable
from stepwell.common.async_calls import call
from stepwell.common.processes import plain_environment, run_command

Messages: TypeAlias = list[Mapping[str, Any]]
MakeMessages: TypeAlias = Callable[[Sample], str | Sequence[Mapping[str, Any]]]
RewardText: TypeAlias = Callable[[Sample, str], float | None] | Callable[[Sample, str], Awaitable[float | None]]
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class SingleTurn:
    """One question, one answer."""

    def __init__(self, messages: MakeMessages, reward: RewardText | None = None, **sampling: Any) -> None:
        self._messages = messages
        self._reward = reward
        self._sampling = sampling

    async def __call__(self, rollout: Rollout) -> float | None:
        reply = await rollout.chat(_conversation(self._messages, rollout.sample), **self._sampling)
        return await _scored(self._reward, rollout.sample, reply.get("content") or "")


class ToolLoop:
    """The model calls tools until it answers without a call, or `max_turns` is reached.

    A tool is a function, sync or async; its signature and docstring tell the model how to call it. Its exceptions, and
    arguments that cannot be parsed, are returned to the model; a fault of the machine, such as a full disk, ends the
    rollout.
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        messages: MakeMessages,
        reward: RewardText | None = None,
        *,
        max_turns: int = 8,
        **sampling: Any,
    ) -> None:
        self._tools = tools
        self._messages = messages
        self._reward = reward
        self._max_turns = max_turns
        self._sampling = {"tools": [_described_tool(name, tool) for name, tool in tools.items()], **sampling}

    async def __call__(self, rollout: Rollout) -> float | None:
        messages = _conversation(self._messages, rollout.sample)
        for _ in range(self._max_turns):
            reply = await rollout.chat(messages, **self._sampling)
            messages.append(reply)
            calls = reply.get("tool_calls") or []
            if not calls:
                break
            messages += [await self._answer(asked) for asked in calls]
        return await _scored(self._reward, rollout.sample, messages_text(messages))

    async def _answer(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = asked["function"]
        return {
            "role": "tool",
            "tool_call_id": asked["id"],
            "content": await self._result(wanted["name"], wanted["arguments"]),
        }

    async def _result(self, name: str, arguments: str) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"there is no tool {name!r}; there are: {', '.join(self._tools)}"
        try:
            given = await call(tool, **orjson.loads(arguments or "{}"))
        except Exception as failure:  # a tool may raise anything on the model's arguments
            if is_machine_fault(failure):
                raise
            return described(failure)
        return given if isinstance(given, str) else orjson.dumps(given, default=str).decode()


class SubprocessAgent:
    """A command that gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and its sample as JSON on stdin.

    `command` is its argument list, or a function of the sample that returns one. Of the environment of this process it
    gets PATH, HOME and the like, but no keys; `env` is added. If it fails, so does the rollout; at the flow's timeout
    it is killed with all its children. `reward` gets what it wrote to stdout; `last_number` fits a command that scores
    itself.
    """

    def __init__(
        self,
        command: Sequence[str] | Callable[[Sample], Sequence[str]],
        reward: RewardText | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._reward = reward
        self._env = env or {}

    async def __call__(self, rollout: Rollout) -> float | None:
        words = self._command(rollout.sample) if callable(self._command) else self._command
        env = {
            **plain_environment(),
            "OPENAI_BASE_URL": rollout.base_url,
            "OPENAI_API_KEY": rollout.api_key,
            "OPENAI_MODEL": await rollout.model(),
            **self._env,
        }
        output = await run_command(words, env=env, stdin=orjson.dumps(portable(rollout.sample)))
        return await _scored(self._reward, rollout.sample, output)


def last_number(sample: Sample, output: str) -> float:
    """The last line of `output` as a number."""
    return float(output.rpartition("\n")[2])


def messages_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message; empty if it is not the model's."""
    said = messages[-1]
    return str(said.get("content") or "") if said["role"] == "assistant" else ""


def _conversation(messages: MakeMessages, sample: Sample) -> Messages:
    made = messages(sample)
    return [{"role": "user", "content": made}] if isinstance(made, str) else list(made)


async def _scored(reward: RewardText | None, sample: Sample, text: str) -> float | None:
    return None if reward is None else await call(reward, sample, text)


def _described_tool(name: str, tool: Callable[..., Any]) -> Mapping[str, Any]:
    parameters = inspect.signature(tool, eval_str=True).parameters.values()
    schema = {
        "type": "object",
        "properties": {p.name: _json_type(p.annotation) for p in parameters},
        "required": [p.name for p in parameters if p.default is p.empty],
    }
    described_as = {"name": name, "description": inspect.getdoc(tool) or "", "parameters": schema}
    return {"type": "function", "function": described_as}


def _json_type(annotation: object) -> Mapping[str, str]:
    name = next((written for kind, written in JSON_TYPES.items() if annotation is kind), None)
    return {} if name is None else {"type": name}
