"""An engine's answer in OpenAI's form, whole or streamed, which chat and completions pass on to the agent.

- Token ids and log-probabilities are read before anything is removed from the answer.
- A choice that the engine aborted is not shown to the agent: it can still be continued.
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

ABORT = "abort"
"""The finish_reason of a choice that an engine ends for reasons of its own, such as a weight update."""
NOT_IN_HEAD = ("choices", "usage")


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
                    self.arguments.setdefault(index, []).append(_arguments(call))
                    if name := _function_name(call):
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
        self.done = False
        """The engine has sent [DONE]."""
        self._engine = engine
        self._keep_ids = keep_ids
        self._prompt_ids: IntArray = NO_IDS

    @property
    def is_whole(self) -> bool:
        """Every choice has ended, or the engine has sent an error."""
        ends = [choice.finish_reason for choice in self.choices.values()]
        return self.error is not None or (bool(ends) and None not in ends)

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
            self.error = chunk
            return None
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise EngineUnavailable("the engine's stream has a chunk without choices")
        if not self.head:
            self._read_head(chunk)
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

    def _read_head(self, chunk: dict[str, Any]) -> None:
        self.head = {name: value for name, value in chunk.items() if name not in NOT_IN_HEAD}
        self._engine.hide_prompt(self.head)

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
        return self.choices.setdefault(index, StreamedChoice())


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


def _function_name(call: dict[str, Any]) -> str | None:
    function = call.get("function")
    return read_text(function.get("name")) if isinstance(function, dict) else None


def _arguments(call: dict[str, Any]) -> str:
    function = call.get("function")
    return (read_text(function.get("arguments")) or "") if isinstance(function, dict) else ""
