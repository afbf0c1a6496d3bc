"""Agents that speak the three dialects with the vendors' own packages. Each sends its whole history with each call, and
in it the replies as they were served."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anthropic
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from benchmarks.bridge_rig.talk import Message
from benchmarks.exactness_rig.exactness_tables import CHAT, MESSAGES, RESPONSES

MAX_TOKENS = 400
MODEL = "tiny"


@dataclass(frozen=True)
class Heard:
    """A reply as the agent got it."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    """The name and the arguments of each."""


class CallRefused(Exception):
    """The gateway answered with an error."""


@dataclass(frozen=True)
class Packages:
    """The vendors' clients, which all agents share."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    @classmethod
    def new(cls) -> "Packages":
        return cls(
            openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", max_retries=0),
            anthropic.AsyncAnthropic(base_url="http://127.0.0.1", api_key="-", max_retries=0),
        )

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()


@dataclass(frozen=True)
class Setting:
    """What an agent is given when it begins."""

    base_url: str
    api_key: str
    system: str
    tools: Sequence[Mapping[str, Any]]
    """As chat has them."""
    options: Mapping[str, Any]
    """Sampling parameters that all dialects have, though not all packages."""


class DialectAgent(Protocol):
    async def ask(self, new: Sequence[Message], *, stream: bool) -> Heard:
        """The reply to new messages, which are given as chat has them. CallRefused if there is none."""


class ChatAgent:
    def __init__(self, packages: Packages, setting: Setting) -> None:
        self._client = packages.openai.with_options(base_url=setting.base_url, api_key=setting.api_key)
        self._history: list[Any] = [{"role": "system", "content": setting.system}]
        self._options: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": setting.options}
        if setting.tools:
            self._options["tools"] = setting.tools

    async def ask(self, new: Sequence[Message], *, stream: bool) -> Heard:
        self._history += new
        try:
            message = (await (self._streamed() if stream else self._whole())).choices[0].message
        except openai.APIError as error:
            raise CallRefused(str(error)) from None
        reply = message.model_dump(exclude_none=True, include={"role", "content", "reasoning"})
        called = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
        if called:
            reply["tool_calls"] = [_chat_call(*call) for call in called]
        self._history.append(reply)
        calls = tuple((name, json.loads(arguments)) for _, name, arguments in called)
        return Heard(reply.get("content") or "", reply.get("reasoning") or "", calls)

    async def _whole(self) -> Any:
        return await self._client.chat.completions.create(messages=self._history, **self._options)

    async def _streamed(self) -> Any:
        state: Any = ChatCompletionStreamState()
        chunks: Any = await self._client.chat.completions.create(messages=self._history, stream=True, **self._options)
        async for chunk in chunks:
            state.handle_chunk(chunk)
        return state.get_final_completion()


class MessagesAgent:
    def __init__(self, packages: Packages, setting: Setting) -> None:
        self._client = packages.anthropic.with_options(
            base_url=setting.base_url.removesuffix("/v1"), api_key=setting.api_key
        )
        self._history: list[Any] = []
        self._call_ids: list[str] = []
        self._options: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": MAX_TOKENS,
            "system": setting.system,
            "extra_body": setting.options,
        }
        if setting.tools:
            self._options["tools"] = [_anthropic_tool(tool["function"]) for tool in setting.tools]

    async def ask(self, new: Sequence[Message], *, stream: bool) -> Heard:
        self._history.append({"role": "user", "content": [self._block(message, at) for at, message in enumerate(new)]})
        try:
            message = await (self._streamed() if stream else self._whole())
        except anthropic.APIError as error:
            raise CallRefused(str(error)) from None
        self._history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        uses = [block for block in message.content if block.type == "tool_use"]
        self._call_ids = [block.id for block in uses]
        return Heard(
            "".join(block.text for block in message.content if block.type == "text"),
            "".join(block.thinking for block in message.content if block.type == "thinking"),
            tuple((block.name, block.input) for block in uses),
        )

    def _block(self, message: Message, at: int) -> dict[str, Any]:
        if message["role"] != "tool":
            return {"type": "text", "text": message["content"]}
        return {"type": "tool_result", "tool_use_id": self._call_ids[at], "content": message["content"]}

    async def _whole(self) -> Any:
        return await self._client.messages.create(messages=self._history, **self._options)

    async def _streamed(self) -> Any:
        async with self._client.messages.stream(messages=self._history, **self._options) as stream:
            return await stream.get_final_message()


class ResponsesAgent:
    def __init__(self, packages: Packages, setting: Setting) -> None:
        self._client = packages.openai.with_options(base_url=setting.base_url, api_key=setting.api_key)
        self._history: list[Any] = []
        self._call_ids: list[str] = []
        self._options: dict[str, Any] = {
            "model": MODEL,
            "max_output_tokens": MAX_TOKENS,
            "instructions": setting.system,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "extra_body": setting.options,
        }
        if setting.tools:
            self._options["tools"] = [{"type": "function", **tool["function"]} for tool in setting.tools]

    async def ask(self, new: Sequence[Message], *, stream: bool) -> Heard:
        self._history += [self._item(message, at) for at, message in enumerate(new)]
        try:
            response = await (self._streamed() if stream else self._whole())
        except openai.APIError as error:
            raise CallRefused(str(error)) from None
        self._history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        called = [item for item in response.output if item.type == "function_call"]
        self._call_ids = [item.call_id for item in called]
        thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content or []]
        calls = tuple((item.name, json.loads(item.arguments)) for item in called)
        return Heard(response.output_text, "".join(thoughts), calls)

    def _item(self, message: Message, at: int) -> dict[str, Any]:
        if message["role"] != "tool":
            return {"role": "user", "content": message["content"]}
        return {"type": "function_call_output", "call_id": self._call_ids[at], "output": message["content"]}

    async def _whole(self) -> Any:
        return await self._client.responses.create(input=self._history, **self._options)

    async def _streamed(self) -> Any:
        async with self._client.responses.stream(input=self._history, **self._options) as events:
            return await events.get_final_response()


def _chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """With its fields in the order in which engines serve them: the package has another one, and Mistral's templates
    show a call with the order that they get."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _anthropic_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}


AGENTS: Mapping[str, type[ChatAgent] | type[MessagesAgent] | type[ResponsesAgent]] = {
    CHAT: ChatAgent,
    MESSAGES: MessagesAgent,
    RESPONSES: ResponsesAgent,
}
