"""What one call produced: the reply that the agent got, whole or streamed, and the steps that the gateway recorded.

A reply is assembled like an agent's SDK does it. EngineUnavailable says why a reply is not in OpenAI's format.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from stepwell.doctor.detokenizer import DecodedText
from stepwell.errors import EngineUnavailable
from stepwell.steps.step import Step

DONE = "[DONE]"


@dataclass(slots=True)
class ToolCall:
    name: str = ""
    arguments: str = ""
    """As the agent gets them; valid JSON if the engine's parser works."""


@dataclass(slots=True)
class ParsedReply:
    """One choice."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tools: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ExaminedAnswer:
    """One call: what the agent got, and what the gateway recorded."""

    replies: tuple[ParsedReply, ...] = ()
    steps: tuple[Step, ...] = ()
    decoded: tuple[DecodedText | None, ...] = ()
    """The text of each step's response ids."""
    failure: str = ""
    """Why there is no answer, or no complete one."""

    @property
    def is_sound(self) -> bool:
        """The call succeeded, and none of its steps is quarantined."""
        return not self.failure and bool(self.steps) and all(step.quarantine is None for step in self.steps)


def parse_reply(body: str, *, streamed: bool) -> tuple[ParsedReply, ...]:
    """The choices of an answer, in order."""
    payloads = _events(body) if streamed else [_read(body)]
    replies: dict[int, ParsedReply] = {}
    for payload in payloads:
        if error := payload.get("error"):
            raise EngineUnavailable(error_text(error))
        for choice in payload.get("choices", ()):
            _add(replies.setdefault(choice.get("index", 0), ParsedReply()), choice)
    return tuple(replies[index] for index in sorted(replies))


def error_text(error: Any) -> str:
    return str(error.get("message")) if isinstance(error, dict) else str(error)


def _events(body: str) -> Iterable[Any]:
    data = [line.removeprefix("data:").strip() for line in body.splitlines() if line.startswith("data:")]
    if not data or data[-1] != DONE:
        raise EngineUnavailable("the stream ends without [DONE]")
    return [_read(event) for event in data[:-1]]


def _read(body: str) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EngineUnavailable(f"the answer is not JSON: {body[:80]!r}") from None


def _add(reply: ParsedReply, choice: Any) -> None:
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    reply.text += message.get("content") or ""
    reply.reasoning += message.get("reasoning") or ""
    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    for position, call in enumerate(message.get("tool_calls") or ()):
        _add_call(reply.tools, call.get("index", position), call.get("function") or {})


def _add_call(tools: list[ToolCall], index: int, function: Any) -> None:
    while len(tools) <= index:
        tools.append(ToolCall())
    tools[index].name += function.get("name") or ""
    tools[index].arguments += function.get("arguments") or ""
