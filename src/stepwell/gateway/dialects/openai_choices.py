"""An unstreamed answer, split into what the agent gets and what is recorded."""

from dataclasses import dataclass
from typing import Any

from stepwell.engines.engine import EngineKind
from stepwell.gateway.dialects.chat import name_both
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.wire.openai import (
    Sampled,
    Usage,
    read_choices,
    read_object,
    read_text,
    read_usage,
    write_object,
)


@dataclass(frozen=True, slots=True, eq=False)
class ChoicesReply:
    message: dict[str, Any]
    """What the engine answered, without what the agent did not ask for."""
    choices: tuple[Sampled, ...]
    usage: Usage

    def body(self) -> bytes:
        return write_object(self.message, "answer")

    @property
    def is_aborted(self) -> bool:
        """A choice was ended by the engine, for reasons of its own."""
        return any(choice.finish_reason == "abort" for choice in self.choices)

    def texts(self) -> list[str | None]:
        """What each choice wrote, if it was text alone."""
        return [_text(choice) for choice in self.message["choices"]]


def read_reply(raw: bytes, call: ModelCall, engine: EngineKind) -> ChoicesReply:
    message = read_object(raw, "answer")
    choices = read_choices(message)
    reply = ChoicesReply(message, engine.read_sampled(message, choices), read_usage(message))
    if not call.wants_ids:
        engine.hide_prompt(message)
    for choice in choices:
        if not call.wants_ids:
            engine.hide_tokens(choice)
        trim_choice(choice, call, "message")
    return reply


def trim_choice(choice: dict[str, Any], call: ModelCall, content: str) -> None:
    """Leave in a choice, or a piece of one, what the agent asked for. `content` names what holds its text. Token ids
    are hidden by the engine kind."""
    if not call.wants_logprobs:
        choice["logprobs"] = None
    if isinstance(message := choice.get(content), dict):
        if call.wants_reasoning:
            name_both(message)
        else:
            message.pop("reasoning", None)
            message.pop("reasoning_content", None)


def _text(choice: dict[str, Any]) -> str | None:
    message = choice.get("message")
    if not isinstance(message, dict):
        return read_text(choice.get("text"))
    other = message.get("tool_calls") or message.get("reasoning")
    return None if other else read_text(message.get("content"))
