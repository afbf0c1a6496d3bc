"""An engine's answer in OpenAI's form, whole or streamed, which chat and completions pass on to the agent.

- Token ids and log-probabilities are read before anything is removed from the answer.
- A choice that the engine aborted is not shown to the agent: it can still be continued.
- A server-sent event is read whole or not at all, in the order of arrival, as soon as its last byte is there. Comments
  are dropped: the gateway writes its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepwell.engines.engine import EngineKind
from stepwell.errors import EngineUnavailable
from stepwell.steps.step import IntArray
from stepwell.wire.openai import (
    NO_IDS,
    NO_USAGE,
    Sampled,
    Usage,
    read_choices,
    read_floats,
    read_ids,
    read_object,
    read_text,
    read_usage,
    write_object,
)

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LONGEST_EVENT = 64 * 1024 * 1024
ABORT = "abort"
"""The finish_reason of a choice that an engine ends for reasons of its own, such as a weight update."""
NOT_IN_HEAD = ("choices", "usage")


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventReader:
    """Splits a stream into the payloads of its events."""

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        self._longest = longest
        self._held: list[bytes] = []
        """The parts of an event that is not whole yet."""
        self._held_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that `data` completes."""
        if not self._held and data.startswith(b"data: {") and data.endswith(b"\n\n"):
            payloads = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(payloads) and all(payloads):  # whole events of one line: the usual case
                payloads[-1] = payloads[-1].strip()
                return payloads
        if b"\n" not in data:
            self._hold(data)
            return []
        if self._held:
            data = self._release() + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, rest = data.split(b"\n\n")
        if rest:
            self._hold(rest)
        return _payloads(events)

    def end(self) -> list[bytes]:
        """The payload of a last event that has no blank line after it."""
        return _payloads([self._release()])

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._longest:
            raise EngineUnavailable("the engine's stream has an event that is too long")

    def _release(self) -> bytes:
        data = b"".join(self._held)
        self._held, self._held_bytes = [], 0
        return data


def _payloads(events: list[bytes]) -> list[bytes]:
    return [payload for one in events if (payload := _payload(one))]


def _payload(one: bytes) -> bytes:
    return b"\n".join([line[5:] for line in one.split(b"\n") if line.startswith(b"data:")]).strip()


class Wants(NamedTuple):
    """The parts of an answer that the agent itself asked for. The engine is always asked for all of it."""

    ids: bool = False
    logprobs: bool = False
    usage: bool = False
    """The token count at the end of a stream."""
    reasoning: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ChoicesReply:
    """A whole answer."""

    message: dict[str, Any]
    """The engine's JSON object."""
    choices: tuple[Sampled, ...]
    usage: Usage

    @property
    def is_aborted(self) -> bool:
        return any(choice.finish_reason == ABORT for choice in self.choices)

    def messages(self) -> list[dict[str, Any] | None]:
        """The chat message of each choice; None if it has none."""
        found = [choice.get("message") for choice in self.message["choices"]]
        return [message if isinstance(message, dict) else None for message in found]

    def texts(self) -> list[str | None]:
        """The text of each choice; None if it has tool calls or reasoning."""
        return [_text(choice) for choice in self.message["choices"]]


def read_reply(raw: bytes, engine: EngineKind, *, keep_ids: bool) -> ChoicesReply:
    """`keep_ids`: the token ids stay in the answer."""
    message = read_object(raw, "answer")
    choices = read_choices(message)
    reply = ChoicesReply(message, engine.read_sampled(message, choices), read_usage(message))
    if not keep_ids:
        engine.hide_prompt(message)
        for choice in choices:
            engine.hide_tokens(choice)
    return reply


def write_reply(answer: ChoicesReply, wants: Wants) -> bytes:
    for choice in answer.message["choices"]:
        trim_choice(choice, wants, "message")
    return write_object(answer.message, "answer")


def trim_choice(choice: dict[str, Any], wants: Wants, content: str) -> None:
    """Remove what the agent did not ask for. `content` is the name of the part that holds a chat's text."""
    if not wants.logprobs:
        choice["logprobs"] = None
    message = choice.get(content)
    if isinstance(message, dict) and ("reasoning" in message or "reasoning_content" in message):
        if wants.reasoning:
            copy_reasoning(message)
        else:
            message.pop("reasoning", None)
            message.pop("reasoning_content", None)


def copy_reasoning(message: dict[str, Any]) -> None:
    """`reasoning` and `reasoning_content` are two names of one field: a message that has one gets both."""
    one, other = message.get("reasoning"), message.get("reasoning_content")
    if one is not None and other is None:
        message["reasoning_content"] = one
    elif other is not None and one is None:
        message["reasoning"] = other


@dataclass(slots=True, eq=False)
class StreamedChoice:
    """One choice of a stream, as far as it has arrived."""

    ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_ids: IntArray | None = None
    finish_reason: str | None = None
    shown_tokens: int = 0
    """Tokens whose text the agent has been sent."""
    content: list[str] = field(default_factory=list)
    """The pieces of text that the agent has been sent."""
    reasoning: list[str] = field(default_factory=list)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    """The pieces of each tool call's arguments."""
    names: dict[int, str] = field(default_factory=dict)
    """The names of the functions that are called."""
    call_ids: dict[int, str] = field(default_factory=dict)

    def text(self) -> str | None:
        """The whole text; None if there are tool calls or reasoning."""
        return None if self.arguments or self.reasoning else "".join(self.content)

    def note(self, delta: dict[str, Any]) -> None:
        """Remember a delta that the agent is being sent."""
        self.shown_tokens = len(self.ids)
        if isinstance(text := delta.get("content"), str):
            self.content.append(text)
            if len(delta) == 1:
                return
        if isinstance(thought := delta.get("reasoning") or delta.get("reasoning_content"), str):
            self.reasoning.append(thought)
        if isinstance(calls := delta.get("tool_calls"), list):
            for call in calls:
                if isinstance(call, dict) and isinstance(index := call.get("index"), int):
                    name, arguments = read_function(call)
                    self.arguments.setdefault(index, []).append(arguments)
                    if name:
                        self.names[index] = self.names.get(index, "") + name
                    if isinstance(call_id := call.get("id"), str):
                        self.call_ids.setdefault(index, call_id)

    def message(self) -> dict[str, Any]:
        """The message that the agent has been sent so far."""
        calls = [
            {
                "id": self.call_ids.get(index, ""),
                "type": "function",
                "function": {"name": self.names.get(index, ""), "arguments": "".join(self.arguments[index])},
            }
            for index in sorted(self.arguments)
        ]
        return {"content": "".join(self.content), "reasoning": "".join(self.reasoning), "tool_calls": calls}

    def sampled(self, prompt_ids: IntArray, model: str) -> Sampled:
        return Sampled(
            prompt_ids=prompt_ids if self.prompt_ids is None else self.prompt_ids,
            response_ids=read_ids(self.ids),
            logprobs=read_floats(self.logprobs) if self.logprobs else None,
            finish_reason=self.finish_reason,
            model=model,
        )


class ChoicesStream:
    """Reads a streamed answer: collects the tokens of each choice and returns the chunks that the agent may see."""

    def __init__(self, engine: EngineKind, *, keep_ids: bool) -> None:
        """`keep_ids`: the token ids stay in the chunks."""
        self.usage: Usage = NO_USAGE
        self.choices: dict[int, StreamedChoice] = {}
        self.head: dict[str, Any] = {}
        """The first chunk without its choices: id, model and time, which all chunks of a stream share."""
        self.error: dict[str, Any] | None = None
        """The engine's error object, if the stream ended in one."""
        self.is_whole = False
        """Every choice has ended, or the engine has sent an error."""
        self.done = False
        """The engine has sent [DONE]."""
        self._engine = engine
        self._keep_ids = keep_ids
        self._prompt_ids: IntArray = NO_IDS

    @property
    def is_aborted(self) -> bool:
        return any(choice.finish_reason == ABORT for choice in self.choices.values())

    def messages(self) -> list[dict[str, Any] | None]:
        """The message of each choice that the agent has been sent so far."""
        return [self.choices[index].message() for index in sorted(self.choices)]

    def note_rest(self, chunks: Sequence[Mapping[str, Any]]) -> None:
        """Notes that these chunks complete the answer."""
        for piece in (piece for chunk in chunks for piece in chunk["choices"]):
            self.choices[piece["index"]].note(piece["delta"])

    def texts(self) -> list[str | None]:
        return [self.choices[index].text() for index in sorted(self.choices)]

    def sampled(self) -> list[Sampled]:
        model = read_text(self.head.get("model")) or ""
        return [self.choices[index].sampled(self._prompt_ids, model) for index in sorted(self.choices)]

    def read(self, payload: bytes) -> dict[str, Any] | None:
        """Take the payload of one event. Returns the chunk for the agent; None if there is nothing to show."""
        if payload == b"[DONE]":
            self.done = True
            return None
        chunk = read_object(payload, "stream")
        if chunk.get("error"):
            self.error, self.is_whole = chunk, True
            return None
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise EngineUnavailable("the engine's stream has a chunk without choices")
        if not self.head:
            self.head = {name: value for name, value in chunk.items() if name not in NOT_IN_HEAD}
            self._engine.hide_prompt(self.head)
        if chunk.get("usage"):
            self.usage = read_usage(chunk)
        if (prompt_ids := self._engine.read_prompt(chunk)) is not None:
            self._take_prompt(chunk, prompt_ids)
        if not choices:
            return None if self.is_aborted else chunk
        if len(choices) == 1:  # the usual case
            return chunk if self._read_piece(choices[0]) else None
        chunk["choices"] = [piece for piece in choices if self._read_piece(piece)]
        return chunk if chunk["choices"] else None

    def _take_prompt(self, chunk: dict[str, Any], prompt_ids: IntArray) -> None:
        if len(prompt_ids):
            self._prompt_ids = prompt_ids
        if not self._keep_ids:
            self._engine.hide_prompt(chunk)

    def _read_piece(self, piece: Any) -> bool:
        """Take a piece of a choice. Returns whether it goes to the agent: the end of an aborted choice does not."""
        if not isinstance(piece, dict):
            raise EngineUnavailable("the engine's stream has a choice that is not an object")
        try:
            choice = self.choices[piece["index"]]
        except (KeyError, TypeError):
            choice = self._new_choice(piece.get("index", 0))
        self._engine.read_delta(piece, choice)
        if (finish := piece.get("finish_reason")) is not None:
            choice.finish_reason = read_text(finish)
            ends = [each.finish_reason for each in self.choices.values()]
            self.is_whole = self.error is not None or None not in ends
            if finish == ABORT:
                return False
        delta = piece.get("delta")
        choice.note(delta if type(delta) is dict else {"content": piece.get("text")})
        if not self._keep_ids:
            self._engine.hide_tokens(piece)
        return True

    def _new_choice(self, index: object) -> StreamedChoice:
        if not isinstance(index, int):
            raise EngineUnavailable("the engine's stream has a choice whose index is not a number")
        if index not in self.choices:
            self.choices[index], self.is_whole = StreamedChoice(), self.error is not None
        return self.choices[index]


class ChoicesStreamWriter:
    """Passes an engine's chunks on, without what the agent did not ask for."""

    media_type = MEDIA_TYPE

    def __init__(self, wants: Wants) -> None:
        self._wants = wants

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        choices, wants = chunk["choices"], self._wants
        if not wants.usage:
            if not choices:
                return b""
            chunk.pop("usage", None)
        for piece in choices:
            trim_choice(piece, wants, "delta")
        return b"data: " + write_object(chunk, "stream") + b"\n\n"

    def finish(self, usage: Usage) -> bytes:
        return DONE

    def fail(self, error: bytes) -> bytes:
        return event(error) + DONE

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE


def missing_delta(choice: StreamedChoice, message: Mapping[str, Any]) -> dict[str, Any]:
    """The delta between what the agent has been sent of a choice and the whole message."""
    delta: dict[str, Any] = {}
    for name, sent in (("content", choice.content), ("reasoning", choice.reasoning)):
        if rest := _after("".join(sent), message.get(name) or ""):
            delta[name] = rest
    if calls := _missing_calls(choice.arguments, message.get("tool_calls") or []):
        delta["tool_calls"] = calls
    return delta


def _missing_calls(sent: Mapping[int, Sequence[str]], calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    missing: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        if index not in sent:
            missing.append({**call, "index": index})
        elif rest := _after("".join(sent[index]), call["function"]["arguments"]):
            missing.append({"index": index, "function": {"arguments": rest}})
    return missing


def _after(sent: str, whole: str) -> str:
    """The part of `whole` that was not sent. An engine's parser may place blanks differently in a whole message."""
    if whole.startswith(sent):
        return whole[len(sent) :]
    letters = ((place, letter) for place, letter in enumerate(whole) if not letter.isspace())
    end = 0
    for sent_letter in "".join(sent.split()):
        place, letter = next(letters, (0, ""))
        if letter != sent_letter:
            raise EngineUnavailable("the engine's whole message differs from the text that it streamed; ask again")
        end = place + 1
    return whole[end:]


def _text(choice: dict[str, Any]) -> str | None:
    message = choice.get("message")
    if not isinstance(message, dict):
        return read_text(choice.get("text"))
    other = message.get("tool_calls") or message.get("reasoning") or message.get("reasoning_content")
    return None if other else read_text(message.get("content"))


def read_reasoning(message: Mapping[str, Any]) -> str | None:
    """The reasoning in an engine's message or delta."""
    return read_text(message.get("reasoning")) or read_text(message.get("reasoning_content"))


def read_tool_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls in an engine's message or delta."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise EngineUnavailable("the engine's answer has tool calls that are no objects")
    return calls


def read_function(call: Mapping[str, Any]) -> tuple[str, str]:
    """The name and the arguments of a tool call, or the pieces of them in a delta."""
    function = call.get("function")
    if not isinstance(function, dict):
        return "", ""
    return read_text(function.get("name")) or "", read_text(function.get("arguments")) or ""
