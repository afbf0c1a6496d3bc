"""An unstreamed answer, split into what the agent gets and what is recorded."""

from dataclasses import dataclass
from typing import Any

from stepwell.gateway.dialects.chat import name_both
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.wire.openai import (
    Sampled,
    Usage,
    read_choices,
    read_object,
    read_sampled,
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


def read_reply(raw: bytes, call: ModelCall) -> ChoicesReply:
    message = read_object(raw, "answer")
    choices = read_choices(message)
    reply = ChoicesReply(message, _sampled(message, choices), read_usage(message))
    if not call.wants_ids:
        hide_prompt(message)
    for choice in choices:
        trim_choice(choice, call, "message")
    return reply


def hide_prompt(answer: dict[str, Any]) -> None:
    """Take out what is there because we asked for ids; trim_choice does it in the choices."""
    answer.pop("prompt_token_ids", None)
    answer.pop("prompt_text", None)


def trim_choice(choice: dict[str, Any], call: ModelCall, content: str) -> None:
    """Leave in a choice, or a piece of one, what the agent asked for. `content` names what holds its text."""
    if not call.wants_ids:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
    if not call.wants_logprobs:
        choice["logprobs"] = None
    if isinstance(message := choice.get(content), dict):
        if call.wants_reasoning:
            name_both(message)
        else:
            message.pop("reasoning", None)
            message.pop("reasoning_content", None)


def _sampled(message: dict[str, Any], choices: list[dict[str, Any]]) -> tuple[Sampled, ...]:
    if len(choices) == 1:
        return (read_sampled(message, choices[0]),)
    first = read_sampled(message, choices[0])
    shared = None if "prompt_token_ids" in choices[0] else first.prompt_ids
    return (first, *(read_sampled(message, choice, shared) for choice in choices[1:]))


def _text(choice: dict[str, Any]) -> str | None:
    message = choice.get("message")
    if not isinstance(message, dict):
        return read_text(choice.get("text"))
    other = message.get("tool_calls") or message.get("reasoning")
    return None if other else read_text(message.get("content"))
