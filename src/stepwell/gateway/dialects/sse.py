"""A streamed answer, taken apart as it passes: whole events go on to the agent at once, ids and log-probabilities stay.

What always holds: bytes leave in the order they came, an event is passed on whole or not at all, and an event is
passed on as soon as its last byte is there.
"""

from dataclasses import dataclass, field
from typing import Any

from stepwell.engines.engine import EngineKind
from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai_choices import trim_choice
from stepwell.steps.step import IntArray
from stepwell.wire.openai import (
    NO_IDS,
    NO_USAGE,
    Sampled,
    Usage,
    read_floats,
    read_ids,
    read_object,
    read_text,
    read_usage,
    write_object,
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LONGEST_EVENT = 64 * 1024 * 1024
NOT_IN_HEAD = ("choices", "usage")


@dataclass(slots=True, eq=False)
class StreamedChoice:
    """One choice as far as it has come."""

    ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_ids: IntArray | None = None
    finish_reason: str | None = None
    told: int = 0
    """Tokens of which the agent was sent what they say."""
    content: list[str] = field(default_factory=list)
    """What the agent was sent of its text, in order; beside it, of its thinking and its tool calls' arguments."""
    reasoning: list[str] = field(default_factory=list)
    arguments: dict[int, list[str]] = field(default_factory=dict)

    def text(self) -> str | None:
        """What was written, if it was text alone."""
        return None if self.arguments or self.reasoning else "".join(self.content)

    def note(self, delta: dict[str, Any]) -> None:
        """What the agent is being sent."""
        self.told = len(self.ids)
        if isinstance(text := delta.get("content"), str):
            self.content.append(text)
            if len(delta) == 1:
                return
        if isinstance(thought := delta.get("reasoning") or delta.get("reasoning_content"), str):
            self.reasoning.append(thought)
        if isinstance(calls := delta.get("tool_calls"), list):
            for call in calls:
                if isinstance(call, dict) and isinstance(index := call.get("index"), int):
                    self.arguments.setdefault(index, []).append(_arguments(call))

    def sampled(self, prompt_ids: IntArray, model: str) -> Sampled:
        return Sampled(
            prompt_ids=prompt_ids if self.prompt_ids is None else self.prompt_ids,
            response_ids=read_ids(self.ids),
            logprobs=read_floats(self.logprobs) if self.logprobs else None,
            finish_reason=self.finish_reason,
            model=model,
        )


class StreamReader:
    def __init__(self, call: ModelCall, engine: EngineKind) -> None:
        self.usage: Usage = NO_USAGE
        self.choices: dict[int, StreamedChoice] = {}
        self.head: dict[str, Any] = {}
        """The first chunk without its choices: the id, model and time that further chunks would carry."""
        self.error: bytes | None = None
        """The engine's own error payload, if it ended in one."""
        self.done = False
        """The engine has said that this is all."""
        self._call = call
        self._engine = engine
        self._held: list[bytes] = []
        """Of an event that is not whole yet."""
        self._held_bytes = 0
        self._prompt_ids: IntArray = NO_IDS

    def feed(self, data: bytes) -> bytes:
        """Take what came from the engine; gives what goes to the agent now."""
        line = data.find(b"\n")
        if line == -1:
            self._hold(data)
            return b""
        if self._held:
            data = self._released() + data
        elif line == len(data) - 2 and data.endswith(b"\n\n"):  # just one event, as nearly always
            return self._event(data[:-2])
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, rest = data.split(b"\n\n")
        if rest:
            self._hold(rest)
        return b"".join([self._event(event) for event in events])

    def end(self) -> bytes:
        """The engine has hung up; gives what an event cut off at the end still had to say."""
        return self._event(self._released())

    @property
    def is_whole(self) -> bool:
        """Every choice has come to its end, or the engine has said why not."""
        ends = [choice.finish_reason for choice in self.choices.values()]
        return self.error is not None or (bool(ends) and None not in ends)

    @property
    def is_aborted(self) -> bool:
        """A choice was ended by the engine, for reasons of its own."""
        return any(choice.finish_reason == "abort" for choice in self.choices.values())

    def texts(self) -> list[str | None]:
        return [self.choices[index].text() for index in sorted(self.choices)]

    def sampled(self) -> list[Sampled]:
        model = read_text(self.head.get("model")) or ""
        return [self.choices[index].sampled(self._prompt_ids, model) for index in sorted(self.choices)]

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > LONGEST_EVENT:
            raise EngineUnavailable("the engine's stream has an event without end")

    def _released(self) -> bytes:
        data = b"".join(self._held)
        self._held, self._held_bytes = [], 0
        return data

    def _event(self, event: bytes) -> bytes:
        if event.startswith(b"data: {") and b"\n" not in event:
            return self._chunk(read_object(event[6:], "stream"))
        payload = _data(event)
        if not payload:
            return b""
        if payload == b"[DONE]":
            self.done = True
            return b""
        return self._chunk(read_object(payload, "stream"))

    def _chunk(self, chunk: dict[str, Any]) -> bytes:
        if chunk.get("error"):
            self.error = write_object(chunk, "stream")
            return b""
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise EngineUnavailable("the engine's stream has a chunk without choices")
        if "usage" in chunk:
            self._count(chunk)
        if not self.head:
            self.head = {name: value for name, value in chunk.items() if name not in NOT_IN_HEAD}
            self._engine.hide_prompt(self.head)
        if (prompt_ids := self._engine.read_prompt(chunk)) is not None:
            self._prompt(chunk, prompt_ids)
        if not choices and (not self._call.wants_usage or self.is_aborted):
            return b""
        kept = [piece for piece in choices if self._piece(piece)]
        if len(kept) < len(choices):
            if not kept:
                return b""
            chunk["choices"] = kept
        return b"data: " + write_object(chunk, "stream") + b"\n\n"

    def _prompt(self, chunk: dict[str, Any], prompt_ids: IntArray) -> None:
        if len(prompt_ids):
            self._prompt_ids = prompt_ids
        if not self._call.wants_ids:
            self._engine.hide_prompt(chunk)

    def _count(self, chunk: dict[str, Any]) -> None:
        if chunk["usage"]:
            self.usage = read_usage(chunk)
        if not self._call.wants_usage:
            del chunk["usage"]

    def _piece(self, piece: Any) -> bool:
        """Note a piece of a choice, and trim it; gives whether it goes to the agent.

        The end of an aborted one does not: it may yet be continued.
        """
        if not isinstance(piece, dict):
            raise EngineUnavailable("the engine's stream has a choice that is no object")
        try:
            choice = self.choices[piece["index"]]
        except (KeyError, TypeError):
            choice = self._new_choice(piece.get("index", 0))
        self._engine.read_delta(piece, choice)
        if (finish := piece.get("finish_reason")) is not None:
            choice.finish_reason = read_text(finish)
            if finish == "abort":
                return False
        delta = piece.get("delta")
        choice.note(delta if isinstance(delta, dict) else {"content": piece.get("text")})
        if not self._call.wants_ids:
            self._engine.hide_tokens(piece)
        trim_choice(piece, self._call, "delta")
        return True

    def _new_choice(self, index: object) -> StreamedChoice:
        if not isinstance(index, int):
            raise EngineUnavailable("the engine's stream has a choice whose index is no number")
        return self.choices.setdefault(index, StreamedChoice())


def _data(event: bytes) -> bytes:
    """Of an event that is not a single line of data. Comments are dropped: the gateway has its own."""
    return b"\n".join([line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]).strip()


def _arguments(call: dict[str, Any]) -> str:
    function = call.get("function")
    return (read_text(function.get("arguments")) or "") if isinstance(function, dict) else ""
