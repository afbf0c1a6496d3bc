"""An engine's answer as a message of Anthropic's API, whole or as events.

- The blocks are what the engine sends, in its order: thinking, text, tool_use. No block is empty but a tool's input.
- Ids and signatures end in the sealed uid of the step, so that a client's next request proves which step it continues.
- Arguments of a tool that are no JSON object become {"malformed": their text}. In a stream they have been sent before
  this is known, and stay as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.chat_form import SEPARATOR
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.messages_request import MALFORMED
from stepwell.gateway.dialects.openai_choices import MEDIA_TYPE, ChoicesReply
from stepwell.wire.openai import NO_USAGE, Usage, read_ids, read_text, read_usage, write_object

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
DELTA_END = b"}}\n\n"
TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
DELTAS = {
    TEXT: (b"text_delta", b"text"),
    THINKING: (b"thinking_delta", b"thinking"),
    TOOL_USE: (b"input_json_delta", b"partial_json"),
}
STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


def write_message(call: ModelCall, answer: ChoicesReply) -> bytes:
    choice = answer.message["choices"][0]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise EngineUnavailable("the engine's answer has no message")
    sealed, content = str(call.context), list[dict[str, Any]]()
    if call.wants.reasoning and (thought := _reasoning(message)):
        content.append({"type": THINKING, "thinking": thought, "signature": sealed})
    if text := read_text(message.get("content")):
        content.append({"type": TEXT, "text": text})
    calls = _tool_calls(message)
    content += [_tool_use(place, one, sealed) for place, one in enumerate(calls)]
    reason = _stop_reason(choice.get("finish_reason"), choice.get("stop_reason"), uses_tools=bool(calls))
    return write_object(_message(call, content, answer.usage) | reason, "answer")


class MessageStreamWriter:
    media_type = MEDIA_TYPE

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._sealed = str(call.context)
        self._is_begun = False
        self._index = -1
        """The index of the last block."""
        self._open = ""
        """The type of the last block; empty if it has ended."""
        self._last_call = -1
        """The engine's index of the last tool call."""
        self._delta = b""
        """The event that adds to the open block, up to the added text."""
        self._usage = NO_USAGE
        self._finish_reason: object = None
        self._stop_reason: object = None

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        choices = chunk["choices"]
        if not choices:
            self._usage = read_usage(chunk)
            return b""
        begin = b"" if self._is_begun else self._begin(len(read_ids(chunk.get("prompt_token_ids"))))
        piece = choices[0]
        if piece.get("finish_reason") is not None:
            self._finish_reason, self._stop_reason = piece["finish_reason"], piece.get("stop_reason")
        delta = piece.get("delta")
        if not isinstance(delta, dict):
            return begin
        if self._open == TEXT and len(delta) == 1 and (text := read_text(delta.get("content"))):  # the usual case
            return self._delta + orjson.dumps(text) + DELTA_END
        return begin + b"".join(self._write(delta))

    def finish(self, usage: Usage) -> bytes:
        usage = self._usage if usage.prompt_tokens is None else usage
        reason = _stop_reason(self._finish_reason, self._stop_reason, uses_tools=self._last_call >= 0)
        end = {"type": "message_delta", "delta": reason, "usage": _usage(usage)}
        begin = b"" if self._is_begun else self._begin(usage.prompt_tokens or 0)
        return begin + self._close() + _event("message_delta", end) + _event("message_stop", {"type": "message_stop"})

    def fail(self, error: bytes) -> bytes:
        return b"event: error\ndata: " + error + b"\n\n"

    def keep_alive(self) -> bytes:
        return PING if self._is_begun else self._begin(0) + PING

    def _begin(self, prompt_tokens: int) -> bytes:
        self._is_begun = True
        message = _message(self._call, [], Usage(prompt_tokens, 0)) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"type": "message_start", "message": message})

    def _write(self, delta: Mapping[str, Any]) -> list[bytes]:
        out, calls = list[bytes](), _tool_calls(delta)
        if self._open == TOOL_USE:  # what continues the open block comes first
            self._add_calls(out, calls)
            calls = []
        if self._call.wants.reasoning and (thought := _reasoning(delta)):
            if self._open != THINKING:
                self._start(out, {"type": THINKING, "thinking": "", "signature": ""})
            out.append(self._added(thought))
        if text := read_text(delta.get("content")):
            if self._open != TEXT:
                self._start(out, {"type": TEXT, "text": ""})
            out.append(self._added(text))
        self._add_calls(out, calls)
        return out

    def _add_calls(self, out: list[bytes], calls: Sequence[Mapping[str, Any]]) -> None:
        for place, call in enumerate(calls):
            index = call.get("index", place)
            if not isinstance(index, int) or index < self._last_call:
                raise EngineUnavailable("the engine's stream has a tool call out of its order")
            if index > self._last_call:
                self._last_call = index
                self._start(out, {**_named_call(index, call, self._sealed), "input": {}})
            if arguments := _arguments(call):
                if self._open != TOOL_USE:
                    raise EngineUnavailable("the engine's stream returns to a tool call that had ended")
                out.append(self._added(arguments))

    def _added(self, text: str) -> bytes:
        return self._delta + orjson.dumps(text) + DELTA_END

    def _start(self, out: list[bytes], block: dict[str, Any]) -> None:
        out.append(self._close())
        self._index, self._open = self._index + 1, block["type"]
        self._delta = DELTA % (self._index, *DELTAS[self._open])
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        out.append(_event("content_block_start", start))

    def _close(self) -> bytes:
        """The end of the open block, if there is one."""
        if not self._open:
            return b""
        signature = b""
        if self._open == THINKING:
            delta = {"type": "signature_delta", "signature": self._sealed}
            signature = _event(
                "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}
            )
        self._open = ""
        return signature + _event("content_block_stop", {"type": "content_block_stop", "index": self._index})


def _message(call: ModelCall, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{call.context}",
        "type": "message",
        "role": "assistant",
        "model": str(call.request.get("model") or ""),
        "content": content,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, int]:
    """Whatever the engine had in its cache counts as input."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage.prompt_tokens or 0, **cached, "output_tokens": usage.completion_tokens or 0}


def _stop_reason(finish_reason: object, stop: object, *, uses_tools: bool) -> dict[str, str | None]:
    """`stop` is the engine's: the stop sequence, or the id of a token."""
    if isinstance(finish_reason, str) and finish_reason in STOP_REASONS:
        return {"stop_reason": STOP_REASONS[finish_reason], "stop_sequence": None}
    if uses_tools:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _tool_use(place: int, call: Mapping[str, Any], sealed: str) -> dict[str, Any]:
    arguments = _arguments(call) or "{}"
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    given = orjson.Fragment(arguments) if is_object else {MALFORMED: arguments}
    return {**_named_call(place, call, sealed), "input": given}


def _named_call(place: int, call: Mapping[str, Any], sealed: str) -> dict[str, Any]:
    name = _function(call).get("name")
    if not isinstance(name, str) or not name:
        raise EngineUnavailable("the engine's answer has a tool call without a name")
    call_id = read_text(call.get("id")) or f"call_{place}"
    return {"type": TOOL_USE, "id": f"{call_id}{SEPARATOR}{sealed}", "name": name}


def _tool_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if not calls:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise EngineUnavailable("the engine's answer has tool calls that are no objects")
    return calls


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def _arguments(call: Mapping[str, Any]) -> str:
    return read_text(_function(call).get("arguments")) or ""


def _reasoning(message: Mapping[str, Any]) -> str | None:
    return read_text(message.get("reasoning") or message.get("reasoning_content"))


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: ".encode() + orjson.dumps(data) + b"\n\n"
