"""The products of one call: the reply that the agent got, whole or streamed, and the steps that the gateway recorded.

A reply is assembled like an agent's SDK does it, in the form of each dialect. EngineUnavailable says why it cannot be.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from stepwell.errors import EngineUnavailable
from stepwell.steps.step import Step

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "chat/completions", "completions", "messages", "responses"
"""Paths of the calls, below an agent's base_url."""
DONE = "[DONE]"
ENDS = {"max_tokens": "length", "incomplete": "length", "tool_use": "tool_calls"}
"""Chat's finish_reason for a stop_reason of Messages or a status of Responses; "stop" for all others."""


@dataclass(slots=True)
class ToolCall:
    name: str = ""
    arguments: str = ""
    """The arguments as the agent gets them; valid JSON if the engine's parser works."""


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


def parse_reply(body: str, *, streamed: bool, path: str = CHAT) -> tuple[ParsedReply, ...]:
    """The choices of an answer, in order."""
    if path in WRITTEN:
        written = WRITTEN[path]
        return (_follow(body, written.events) if streamed else _whole(body, written.whole),)
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


def _data(body: str) -> list[str]:
    return [line.removeprefix("data:").strip() for line in body.splitlines() if line.startswith("data:")]


def _events(body: str) -> Iterable[Any]:
    data = _data(body)
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


# -- Messages and Responses --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DialectReader:
    """How a dialect writes a reply."""

    whole: Callable[[ParsedReply, Any], None]
    """Reads an answer that is not streamed."""
    events: Mapping[str, Callable[[ParsedReply, Any], None]]
    """Read the events of a stream, by their type. Those that set the finish_reason end it; others are ignored."""


def _whole(body: str, read: Callable[[ParsedReply, Any], None]) -> ParsedReply:
    answer, reply = _read(body), ParsedReply()
    if error := answer.get("error"):
        raise EngineUnavailable(error_text(error))
    read(reply, answer)
    return reply


def _follow(body: str, readers: Mapping[str, Callable[[ParsedReply, Any], None]]) -> ParsedReply:
    reply = ParsedReply()
    for event in map(_read, _data(body)):
        if error := event.get("error") or (event.get("response") or {}).get("error"):
            raise EngineUnavailable(error_text(error))
        if (read := readers.get(event.get("type"))) is not None:
            read(reply, event)
    if reply.finish_reason is None:
        raise EngineUnavailable("the stream has no end")
    return reply


def _read_message(reply: ParsedReply, message: Any) -> None:
    for block in message["content"]:
        reply.text += block.get("text", "")
        reply.reasoning += block.get("thinking", "")
        if block["type"] == "tool_use":
            reply.tools.append(ToolCall(block["name"], orjson.dumps(block["input"]).decode()))
    _end_message(reply, {"delta": message})


def _open_block(reply: ParsedReply, event: Any) -> None:
    if event["content_block"]["type"] == "tool_use":
        reply.tools.append(ToolCall(event["content_block"]["name"]))


def _add_to_block(reply: ParsedReply, event: Any) -> None:
    delta = event["delta"]
    reply.text += delta.get("text", "")
    reply.reasoning += delta.get("thinking", "")
    if "partial_json" in delta:
        reply.tools[-1].arguments += delta["partial_json"]


def _end_message(reply: ParsedReply, event: Any) -> None:
    reply.finish_reason = ENDS.get(event["delta"]["stop_reason"], "stop")


def _read_response(reply: ParsedReply, response: Any) -> None:
    for item in response["output"]:
        parts = "".join(part.get("text", "") for part in (*item.get("content", ()), *item.get("summary", ())))
        if item["type"] == "reasoning":
            reply.reasoning += parts
        elif item["type"] == "function_call":
            reply.tools.append(ToolCall(item["name"], item["arguments"]))
        else:
            reply.text += parts
    _end_response(reply, {"response": response})


def _open_item(reply: ParsedReply, event: Any) -> None:
    if event["item"]["type"] == "function_call":
        reply.tools.append(ToolCall(event["item"]["name"]))


def _add_text(reply: ParsedReply, event: Any) -> None:
    reply.text += event["delta"]


def _add_reasoning(reply: ParsedReply, event: Any) -> None:
    reply.reasoning += event["delta"]


def _add_arguments(reply: ParsedReply, event: Any) -> None:
    reply.tools[-1].arguments += event["delta"]


def _end_response(reply: ParsedReply, event: Any) -> None:
    ended = ENDS.get(event["response"]["status"], "stop")
    reply.finish_reason = "tool_calls" if reply.tools and ended == "stop" else ended


WRITTEN: Mapping[str, DialectReader] = {
    MESSAGES: DialectReader(
        _read_message,
        {"content_block_start": _open_block, "content_block_delta": _add_to_block, "message_delta": _end_message},
    ),
    RESPONSES: DialectReader(
        _read_response,
        {
            "response.output_item.added": _open_item,
            "response.output_text.delta": _add_text,
            "response.reasoning_text.delta": _add_reasoning,
            "response.function_call_arguments.delta": _add_arguments,
            "response.completed": _end_response,
            "response.incomplete": _end_response,
        },
    ),
}
