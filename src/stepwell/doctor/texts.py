"""Whether tokens spell what an agent was told, and where two texts part."""

import json
from collections.abc import Sequence

from stepwell.doctor.detokenizer import Spelled
from stepwell.doctor.replies import Heard, ToolCall

SHOWN = 24
"""Characters shown of a text from where it differs."""


def misspelled(heard: Heard, spelled: Spelled, stop: str) -> str:
    """How the ids contradict what the agent was told; empty if they do not."""
    if heard.tools or heard.reasoning:
        return _parts_missing(heard, spelled.text)
    said = heard.text.lstrip(" ")
    ends = ("", spelled.end) if heard.finish_reason == "stop" else ("",)
    spellings = [text.lstrip(" ") for text in (spelled.text, spelled.bare) if text is not None]
    if any(_spells(spelt, said, ends, stop) for spelt in spellings):
        return ""
    return f"the ids do not spell the text: {difference(spellings[0], said)}"


def _spells(spelt: str, said: str, ends: Sequence[str], stop: str) -> bool:
    rest = spelt.removeprefix(said) if spelt.startswith(said) else None
    stopped = bool(stop) and rest is not None and rest.startswith(stop)
    return rest in ends or stopped or _same_but_for_halves(said, spelt, ends)


def _same_but_for_halves(said: str, spelt: str, ends: Sequence[str]) -> bool:
    """Bytes that are no character are shown as U+FFFD, one for each or one for several; engines and tokenizers differ
    in that, and it is no difference of tokens."""
    return any(said.replace("\ufffd", "") + end == spelt.replace("\ufffd", "") for end in ends if "\ufffd" in spelt)


def _parts_missing(heard: Heard, spelt: str) -> str:
    """Of an answer that a parser has taken apart: each part must be there, in whatever syntax."""
    for text in (heard.text.strip(), heard.reasoning.strip()):
        if text not in spelt:
            return f"the ids do not spell the text: {difference(spelt, text)}"
    written = spelt.casefold()
    for call in heard.tools:
        for part in (call.name, *_leaves(parsed(call))):
            if part.casefold() not in written:
                return f"the ids do not spell the call {call.name}({call.arguments}): {part!r} is not in {spelt[:80]!r}"
    return ""


def parsed(call: ToolCall) -> object:
    try:
        return (call.name, json.loads(call.arguments))
    except ValueError:
        return (call.name, call.arguments)


def _leaves(value: object) -> list[str]:
    """The names and values in a call's arguments, as text."""
    if isinstance(value, dict):
        return [text for name, inner in value.items() for text in (str(name), *_leaves(inner))]
    if isinstance(value, (list, tuple)):
        return [text for inner in value for text in _leaves(inner)]
    return [value if isinstance(value, str) else json.dumps(value)]


def difference(expected: str, found: str) -> str:
    at = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
    at = min(len(expected), len(found)) if at is None else at
    return f"at character {at}, {expected[at : at + SHOWN]!r} became {found[at : at + SHOWN]!r}"
