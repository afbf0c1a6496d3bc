"""What an agent is told: an answer of the gateway's, whole or streamed, put together as an agent's SDK does it.

Where an answer is not as OpenAI's are, EngineUnavailable says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from stepwell.errors import EngineUnavailable

DONE = "[DONE]"


@dataclass(slots=True)
class ToolCall:
    name: str = ""
    arguments: str = ""
    """As the agent gets them: JSON, if all is well."""


@dataclass(slots=True)
class Heard:
    """One choice."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tools: list[ToolCall] = field(default_factory=list)


def hear(body: str, *, streamed: bool) -> tuple[Heard, ...]:
    """The choices of an answer, in their order."""
    payloads = _events(body) if streamed else [_read(body)]
    heard: dict[int, Heard] = {}
    for payload in payloads:
        if error := payload.get("error"):
            raise EngineUnavailable(error_text(error))
        for choice in payload.get("choices", ()):
            _add(heard.setdefault(choice.get("index", 0), Heard()), choice)
    return tuple(heard[index] for index in sorted(heard))


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


def _add(heard: Heard, choice: Any) -> None:
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    heard.text += said.get("content") or ""
    heard.reasoning += said.get("reasoning") or ""
    heard.finish_reason = choice.get("finish_reason") or heard.finish_reason
    for place, call in enumerate(said.get("tool_calls") or ()):
        _add_call(heard.tools, call.get("index", place), call.get("function") or {})


def _add_call(tools: list[ToolCall], index: int, function: Any) -> None:
    while len(tools) <= index:
        tools.append(ToolCall())
    tools[index].name += function.get("name") or ""
    tools[index].arguments += function.get("arguments") or ""
