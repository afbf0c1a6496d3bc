"""The words of the user or a tool after each step, read from the prompts of the steps that follow.

- The next state of a step is in the first later step that continues its conversation. Side calls, sub-agents and
  parallel samples of one prompt are told apart by their messages.
- Replies of the model are not compared if only one step has that prompt: templates write them again in another form.
- A prompt of an unknown template is compared as text, and its markers are guessed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Literal, TypeAlias

from stepwell.rewards.builtin.matching import without_reasoning
from stepwell.rewards.sample import SampleStep
from stepwell.steps.conversation import ROLES, ChatMessage, read_messages

Speaker: TypeAlias = Literal["user", "tool"]

ASSISTANT, UNKNOWN_TEMPLATE = "assistant", "prompt"
TOOL_RESULT = re.compile(r"\s*<(tool_response|tool_result|function_results|tool_output)\b")
"""Templates that have no role for tools put their results into messages of the user."""
TOOL_TAG = re.compile(r"</?(tool_response|tool_result|function_results|tool_output)\b[^>]*>")
NOT_SAID = re.compile(r"<(system-reminder|system_reminder|environment_context)>.*?</\1>", re.DOTALL)
"""The parts that harnesses add to the messages of the user."""
MARKER = re.compile(r"<\|?[\w ]{1,30}\|?>|\[/?INST\]")
ROLE_NAMES = {**ROLES, "model": ASSISTANT}


@dataclass(frozen=True, slots=True)
class Utterance:
    """One message of the user, or one result of a tool."""

    speaker: Speaker
    text: str


@dataclass(frozen=True, slots=True)
class NextState:
    request: str
    """The last message of the user before the step; empty if there is none."""
    reply: str
    """The model's answer."""
    utterances: tuple[Utterance, ...]
    """The utterances after the reply, until the model spoke again."""

    def said_by(self, speaker: Speaker) -> list[str]:
        return [each.text for each in self.utterances if each.speaker == speaker]


def next_states(steps: Sequence[SampleStep]) -> list[NextState | None]:
    """One for each step; None if none is known yet, and for side calls."""
    return [_next_state(step, steps[place + 1 :], steps) for place, step in enumerate(steps)]


def _next_state(step: SampleStep, later_steps: Iterable[SampleStep], steps: Sequence[SampleStep]) -> NextState | None:
    if step.is_aside:
        return None
    for later in later_steps:
        messages = None if later.is_aside else _said_after(step, later, steps)
        if messages is not None:
            return NextState(_request(step), step.response_text, tuple(map(_utterance, messages)))
    return None


def _said_after(step: SampleStep, later: SampleStep, steps: Sequence[SampleStep]) -> list[ChatMessage] | None:
    """The messages after the step's reply, until the model's next one; None if `later` does not continue the step."""
    before, after = _prompt(step), _prompt(later)
    if before[0]["role"] == UNKNOWN_TEMPLATE:
        return _text_after(step, later)
    own, rest = after[: len(before)], after[len(before) :]
    if not rest or rest[0]["role"] != ASSISTANT or _spoken(own) != _spoken(before):
        return None
    has_twin = sum(_spoken(_prompt(other)) == _spoken(before) for other in steps if not other.is_aside) > 1
    if has_twin and not _is_same_reply(step.response_text, rest[0]["content"]):
        return None
    return _first_turn(rest)


def _prompt(step: SampleStep) -> list[ChatMessage]:
    """The prompt without the message that the model was asked to write."""
    messages = read_messages(step.prompt_text, "")
    return messages[:-1] if len(messages) > 1 else messages


def _spoken(messages: Iterable[ChatMessage]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"].strip()) for each in messages if each["role"] != ASSISTANT]


def _first_turn(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """The messages between the first and the second turn of the model."""
    after_reply = dropwhile(lambda message: message["role"] == ASSISTANT, messages)
    return list(takewhile(lambda message: message["role"] != ASSISTANT, after_reply))


def _is_same_reply(response: str, written_again: str) -> bool:
    """Whitespace and reasoning may differ."""
    return _words(response) == _words(written_again) or _words(without_reasoning(response)) == _words(
        without_reasoning(written_again)
    )


def _words(text: str) -> Counter[str]:
    return Counter(text.split())


def _text_after(step: SampleStep, later: SampleStep) -> list[ChatMessage] | None:
    told = step.prompt_text + step.response_text
    if not later.prompt_text.startswith(told):
        return None
    messages = [{"role": ASSISTANT, "content": ""}]
    role = "user"
    for part in MARKER.split(later.prompt_text[len(told) :]):
        first, newline, rest = part.strip().partition("\n")
        if first in ROLE_NAMES:
            role, part = ROLE_NAMES[first], rest if newline else ""
        if part.strip():
            messages.append({"role": role, "content": part.strip()})
    return _first_turn(messages)


def _request(step: SampleStep) -> str:
    said = [_utterance(message) for message in _prompt(step) if message["role"] != ASSISTANT]
    return next((each.text for each in reversed(said) if each.speaker == "user"), "")


def _utterance(message: ChatMessage) -> Utterance:
    role, text = ROLE_NAMES.get(message["role"], "user"), message["content"]
    is_tool = role == "tool" or TOOL_RESULT.match(text) is not None
    return (
        Utterance("tool", TOOL_TAG.sub("", text).strip())
        if is_tool
        else Utterance("user", NOT_SAID.sub("", text).strip())
    )
