"""A streamed response: the engine's chunks as events of the Responses API, as they arrive.

- One item is open at a time. It ends when the next one begins, or with the answer.
- An event is written without its end first: the sequence number comes last. What all deltas of an item have in common
  is written once.
"""

from typing import Any

import orjson

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.openai_choices import KEEP_ALIVE, MEDIA_TYPE
from stepwell.gateway.dialects.responses_events import (
    CUT_OFF,
    ResponseContext,
    ResponseObject,
    item_status,
    response_usage,
)
from stepwell.gateway.dialects.responses_output import (
    CustomInput,
    CustomOutput,
    ItemStatus,
    MessageOutput,
    OutputItem,
    TextEvents,
    new_call,
    new_message,
    new_reasoning,
    output_part,
    read_calls,
    read_function,
)
from stepwell.wire.openai import Usage, read_text

MESSAGE, REASONING = "content", "reasoning"
"""The keys of these items, which are the names of their text in a delta. The key of a call is its index there."""


class ItemStream:
    """The events of one item."""

    __slots__ = ("_decoder", "_delta", "_index", "_item", "_texts", "key")

    def __init__(self, key: str | int, item: OutputItem, index: int) -> None:
        self.key = key
        self._item = item
        self._index = index
        self._decoder = CustomInput() if isinstance(item, CustomOutput) else None
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
        if thought := read_text(delta.get("reasoning")) or read_text(delta.get("reasoning_content")):
            self._write(REASONING, thought)
        if text := read_text(delta.get("content")):
            self._write(MESSAGE, text)
        if delta.get("tool_calls"):
            for call in read_calls(delta):
                self._take_call(call)

    def _take_call(self, call: dict[str, Any]) -> None:
        function, index = read_function(call), call.get("index") or 0
        if not isinstance(index, int):
            raise EngineUnavailable("the engine's stream has a tool call whose index is not a number")
        if index not in self._calls:
            self._calls.add(index)
            self._open(index, read_text(call.get("id")) or "", read_text(function.get("name")) or "")
        if arguments := read_text(function.get("arguments")):
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
