"""The response object in each of its states, and a streamed response: the engine's chunks as events, as they arrive.

- One item is open at a time. It ends when the next one begins, or with the answer.
- An event is written without its end first: the sequence number comes last. What all deltas of an item have in common
  is written once.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.openai_choices import (
    KEEP_ALIVE,
    MEDIA_TYPE,
    read_function,
    read_reasoning,
    read_tool_calls,
)
from stepwell.gateway.dialects.responses_output import (
    CallOutput,
    CustomInput,
    ItemStatus,
    MessageOutput,
    OutputContext,
    OutputItem,
    TextEvents,
    new_call,
    new_message,
    new_reasoning,
    output_part,
)
from stepwell.wire.openai import Usage, read_text

CUT_OFF = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is incomplete, by the engine's finish_reason."""
MESSAGE, REASONING = "content", "reasoning"
"""The keys of these items, which are the names of their text in a delta. The key of a call is its index there."""


class ResponseContext(NamedTuple):
    """The context of a response: that of its output items, and the settings that it repeats."""

    output: OutputContext
    settings: bytes
    """JSON of the fields of the request that the response repeats, without its opening brace."""

    @property
    def id(self) -> str:
        return self.output.attach_seal("resp")


def settings_of(request: Mapping[str, Any], chat: Mapping[str, Any], *, is_stored: bool) -> dict[str, Any]:
    """The request's settings that a response repeats. `chat` is the request in force."""
    reasoning, text = request.get("reasoning") or {}, request.get("text") or {}
    return {
        "background": False,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "max_tool_calls": request.get("max_tool_calls"),
        "metadata": request.get("metadata") or {},
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "previous_response_id": request.get("previous_response_id"),
        "prompt_cache_key": request.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": request.get("safety_identifier"),
        "service_tier": "default",
        "store": is_stored,
        "temperature": chat["temperature"],
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_logprobs": 0,
        "top_p": chat["top_p"],
        "truncation": "disabled",
        "user": request.get("user"),
    }


class ResponseObject:
    """Writes the response object in each of its states."""

    def __init__(self, context: ResponseContext, model: str) -> None:
        self._head = {"id": context.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._settings = context.settings

    def whole(
        self,
        finish_reason: str | None,
        output: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any],
        sampled: Mapping[str, Any] | None,
    ) -> bytes:
        """An answer that is not streamed. `sampled` is added if it is given."""
        response = self.ended(finish_reason, [orjson.dumps(item) for item in output], usage)
        return response if sampled is None else response[:-1] + b',"sampled":' + orjson.dumps(sampled) + b"}"

    def begun(self) -> bytes:
        return self._write("in_progress", b"[]")

    def ended(self, finish_reason: str | None, output: Sequence[bytes], usage: Mapping[str, Any]) -> bytes:
        reason = CUT_OFF.get(finish_reason or "")
        items = b"[" + b",".join(output) + b"]"
        details = {"reason": reason} if reason else None
        return self._write("incomplete" if reason else "completed", items, details=details, usage=usage)

    def failed(self, message: str, output: Sequence[bytes]) -> bytes:
        error = {"code": "server_error", "message": message}
        return self._write("failed", b"[" + b",".join(output) + b"]", error=error)

    def _write(
        self,
        status: str,
        output: bytes,
        *,
        error: Mapping[str, str] | None = None,
        details: Mapping[str, str] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        state = {**self._head, "status": status, "error": error, "incomplete_details": details, "usage": usage}
        return orjson.dumps(state)[:-1] + b',"output":' + output + b"," + self._settings


def item_status(finish_reason: str | None) -> ItemStatus:
    """The status of an answer's last item."""
    return "incomplete" if finish_reason in CUT_OFF else "completed"


def response_usage(counted: object, usage: Usage) -> dict[str, Any]:
    """The token count of the engine's usage object; `usage` counts if there is none."""
    given: Mapping[str, Any] = counted if isinstance(counted, dict) else {}
    prompt = _count(given.get("prompt_tokens", usage.prompt_tokens))
    completion = _count(given.get("completion_tokens", usage.completion_tokens))
    details = given.get("prompt_tokens_details"), given.get("completion_tokens_details")
    read, written = (part if isinstance(part, dict) else {} for part in details)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": _count(read.get("cached_tokens")), "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": _count(written.get("reasoning_tokens"))},
        "total_tokens": prompt + completion,
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


class ItemStream:
    """The events of one item."""

    __slots__ = ("_decoder", "_delta", "_index", "_item", "_texts", "key")

    def __init__(self, key: str | int, item: OutputItem, index: int) -> None:
        self.key = key
        self._item = item
        self._index = index
        self._decoder = CustomInput() if isinstance(item, CallOutput) and item.is_custom else None
        self._texts: list[str] = []
        self._delta = b""
        """The beginning of a delta's event; empty if the item has no deltas."""

    def opened(self) -> list[bytes]:
        events = self._item.events
        if events is None:
            return []
        opening = [self._event("response.output_item.added", item=self._item.value("", "in_progress"))]
        if events.part is not None:
            opening.append(self._text_event(events, events.part.added, part=output_part(events.part.kind, "")))
        self._delta = self._text_event(events, events.delta, **self._no_logprobs()) + b',"delta":'
        return opening

    def delta(self, text: str) -> bytes:
        """Empty if nothing can be shown yet."""
        if self._decoder is not None:
            text = self._decoder.feed(text)
        return self._shown(text)

    def numbered_delta(self, text: str, number: int) -> bytes:
        """A whole event, of an item whose text needs no decoding."""
        self._texts.append(text)
        return b'%b%b,"sequence_number":%d}\n\n' % (self._delta, orjson.dumps(text), number)

    def closed(self, status: ItemStatus) -> tuple[list[bytes], bytes]:
        """The last events, and the whole item."""
        rest = self._shown(self._decoder.end()) if self._decoder is not None else b""
        text, events = "".join(self._texts), self._item.events
        value, closing = self._item.value(text, status), [rest] if rest else []
        if events is None:
            closing.append(self._event("response.output_item.added", item={**value, "status": "in_progress"}))
        else:
            closing.append(self._text_event(events, events.done, **{events.done_field: text}, **self._no_logprobs()))
            if events.part is not None:
                closing.append(self._text_event(events, events.part.done, part=output_part(events.part.kind, text)))
        closing.append(self._event("response.output_item.done", item=value))
        return closing, orjson.dumps(value)

    def _shown(self, text: str) -> bytes:
        if not text:
            return b""
        self._texts.append(text)
        return self._delta + orjson.dumps(text) if self._delta else b""

    def _no_logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if isinstance(self._item, MessageOutput) else {}

    def _text_event(self, events: TextEvents, name: str, **fields: Any) -> bytes:
        place = {events.part.index_field: 0} if events.part is not None else {}
        return self._event(name, item_id=self._item.id, **place, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        payload = orjson.dumps({"type": name, "output_index": self._index, **fields})
        return b"event: " + name.encode() + b"\ndata: " + payload[:-1]


class ResponseEvents:
    """Writes one streamed response."""

    media_type = MEDIA_TYPE

    def __init__(self, context: ResponseContext, model: str) -> None:
        self._context = context
        self._model = model
        self._response: ResponseObject | None = None
        """None before the first event."""
        self._events: list[bytes] = []
        """Events that are not sent yet."""
        self._sequence = 0
        self._item: ItemStream | None = None
        """The one that is open."""
        self._output: list[bytes] = []
        """The items that have ended."""
        self._calls: set[int] = set()
        """The calls that have begun."""
        self._finish_reason: str | None = None
        self._usage: object = None

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        if (text := self._plain_text(chunk)) and self._item is not None:
            number, self._sequence = self._sequence, self._sequence + 1
            return self._item.numbered_delta(text, number)
        if self._response is None:
            self._begin(read_text(chunk.get("model")))
        if (usage := chunk.get("usage")) is not None:
            self._usage = usage
        for piece in chunk["choices"]:
            if isinstance(delta := piece.get("delta"), dict):
                self._take(delta)
            if (finish := piece.get("finish_reason")) is not None:
                self._finish_reason = read_text(finish)
        return self._sent()

    def finish(self, usage: Usage) -> bytes:
        response = self._response or self._begin(None)
        if self._item is None:
            self._open(MESSAGE)
        self._close(item_status(self._finish_reason))
        ended = response.ended(self._finish_reason, self._output, response_usage(self._usage, usage))
        name = "response.incomplete" if self._finish_reason in CUT_OFF else "response.completed"
        self._events.append(_response_event(name, ended))
        return self._sent()

    def fail(self, error: bytes) -> bytes:
        response = self._response or self._begin(None)
        self._events.append(_response_event("response.failed", response.failed(_error_text(error), self._output)))
        return self._sent()

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _plain_text(self, chunk: dict[str, Any]) -> str | None:
        """The text of a chunk that only adds some to the open item, which is the usual case."""
        item, choices = self._item, chunk["choices"]
        if item is None or len(choices) != 1 or "usage" in chunk:
            return None
        piece = choices[0]
        delta = piece.get("delta")
        if not isinstance(delta, dict) or len(delta) != 1 or piece.get("finish_reason") is not None:
            return None
        return read_text(delta.get(item.key))

    def _begin(self, model: str | None) -> ResponseObject:
        self._response = ResponseObject(self._context, model or self._model)
        begun = self._response.begun()
        self._events += [_response_event(name, begun) for name in ("response.created", "response.in_progress")]
        return self._response

    def _take(self, delta: dict[str, Any]) -> None:
        if thought := read_reasoning(delta):
            self._write(REASONING, thought)
        if text := read_text(delta.get("content")):
            self._write(MESSAGE, text)
        for call in read_tool_calls(delta):
            self._take_call(call)

    def _take_call(self, call: dict[str, Any]) -> None:
        (name, arguments), index = read_function(call), call.get("index") or 0
        if not isinstance(index, int):
            raise EngineUnavailable("the engine's stream has a tool call whose index is not a number")
        if index not in self._calls:
            self._calls.add(index)
            self._open(index, read_text(call.get("id")) or "", name)
        if arguments:
            self._write(index, arguments)

    def _write(self, key: str | int, text: str) -> None:
        item = self._item
        if item is None or item.key != key:
            item = self._open(key)
        if event := item.delta(text):
            self._events.append(event)

    def _open(self, key: str | int, call_id: str = "", name: str = "") -> ItemStream:
        """Begin the next item."""
        self._close("completed")
        index, context = len(self._output), self._context.output
        item: OutputItem
        if key == MESSAGE:
            item = new_message(context, index)
        elif key == REASONING:
            item = new_reasoning(context, index)
        elif name:
            item = new_call(context, index, call_id, name)
        else:
            raise EngineUnavailable("the engine's stream has a part of a tool call that has ended or has no name")
        self._item = ItemStream(key, item, index)
        self._events += self._item.opened()
        return self._item

    def _close(self, status: ItemStatus) -> None:
        if self._item is not None:
            closing, whole = self._item.closed(status)
            self._events += closing
            self._output.append(whole)
            self._item = None

    def _sent(self) -> bytes:
        """The events so far, each with its number."""
        parts = []
        for event in self._events:
            parts.append(b'%b,"sequence_number":%d}\n\n' % (event, self._sequence))
            self._sequence += 1
        self._events.clear()
        return b"".join(parts)


def _response_event(name: str, response: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b","response":%b' % (name.encode(), name.encode(), response)


def _error_text(error: bytes) -> str:
    """The message of OpenAI's error object."""
    told = orjson.loads(error).get("error")
    return str(told.get("message") if isinstance(told, dict) else told)
