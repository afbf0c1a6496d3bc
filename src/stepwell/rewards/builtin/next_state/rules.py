"""The rules of `next_state`: one row each, tried in order; the first that fits gives the reward.

- A row has a name, a reward from -1 to 1, a speaker, and patterns (regular expressions; case is ignored) or a function.
- A pattern of `unless` that is found keeps the row from fitting.
- The words of the user come before the results of tools.
- Of a long message only the beginning and the end are read, without code and quotations: a pasted text says nothing
  of the step.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import TypeAlias

from stepwell.errors import BadRequest
from stepwell.rewards.builtin import next_state_phrases as phrases
from stepwell.rewards.builtin.matching import compiled
from stepwell.rewards.builtin.next_state_rules import NextState, Speaker

Find: TypeAlias = Callable[[NextState], str]
"""Gives the text that fits, or an empty one."""

NO_RULE = "no rule fits what was said next"
READ_HEAD, READ_TAIL = 280, 160
"""Characters of a message that are read."""
LONGEST_EVIDENCE = 200
SIMILAR = 0.85
"""The ratio of equal words from which on two requests are the same."""
FEWEST_WORDS = 3
"""A shorter request is not repeated but a common word, as "yes"."""
CODE = re.compile(r"```.*?(```|\Z)|^\s*>.*?$", re.DOTALL | re.MULTILINE)
HINTS = [re.compile(pattern, re.IGNORECASE) for pattern in phrases.HINTS]


@dataclass(frozen=True)
class Rule:
    name: str
    reward: float
    speaker: Speaker = "user"
    patterns: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    find: Find | None = field(default=None, repr=False)
    """Tried if no pattern is found."""
    gives_hint: bool = False
    """Does the message say what was wanted instead?"""

    def __post_init__(self) -> None:
        if not -1.0 <= self.reward <= 1.0:
            raise BadRequest(f"the reward of rule {self.name!r} is {self.reward}; it must be from -1 to 1")

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        return _any_of(self.patterns)

    @cached_property
    def exception(self) -> re.Pattern[str] | None:
        return _any_of(self.unless)

    def compile(self) -> None:
        """BadRequest if a pattern is no regular expression."""
        _ = self.pattern, self.exception

    def evidence(self, state: NextState) -> "Evidence | None":
        for text in map(_read_part, state.said_by(self.speaker)):
            match = self.pattern and self.pattern.search(text)
            if match and not (self.exception and self.exception.search(text)):
                hint = _hint(text, match.end()) if self.gives_hint else ""
                return Evidence(self.name, self.reward, self.speaker, _excerpt(text, match.start()), hint)
        if self.find is not None and (text := self.find(state)):
            return Evidence(self.name, self.reward, self.speaker, _excerpt(text, 0))
        return None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Which rule, or which judge, gave which reward, and for what."""

    rule: str
    reward: float
    speaker: Speaker
    text: str
    """The words that were said, shortened."""
    hint: str = ""
    """The wish that was said instead; empty if nobody said it."""
    reason: str = ""
    """The reason that a judge gave."""

    def details(self) -> dict[str, str]:
        """The details as the pool keeps them."""
        told = {"rule": self.rule, "speaker": self.speaker, "text": self.text, "hint": self.hint, "reason": self.reason}
        return {name: value for name, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class Abstention:
    """Something was said, and it tells nothing of the step."""

    why: str = NO_RULE
    is_unreadable: bool = False
    """A judge's answer could not be read."""


def repeated_request(state: NextState) -> str:
    """The user's message, if it asks for the same again."""
    asked = _normal_words(state.request)
    for text in state.said_by("user"):
        words = _normal_words(text)
        if min(len(words), len(asked)) >= FEWEST_WORDS and _similarity(words, asked) >= SIMILAR:
            return text
    return ""


RULES: tuple[Rule, ...] = (
    Rule("undo", -1.0, patterns=phrases.UNDO, unless=phrases.NO_UNDO),
    Rule("correction", -1.0, patterns=phrases.CORRECTION, unless=phrases.NO_CORRECTION, gives_hint=True),
    Rule("repetition", -0.5, find=repeated_request),
    Rule("thanks", 1.0, patterns=phrases.THANKS, unless=phrases.NO_THANKS),
    Rule("acceptance", 0.5, patterns=phrases.ACCEPTANCE, unless=phrases.NO_ACCEPTANCE),
    Rule("tool_error", -0.5, "tool", patterns=phrases.TOOL_ERROR, unless=phrases.NO_TOOL_ERROR),
)


def extended(
    rules: Iterable[Rule],
    name: str,
    *,
    reward: float | None = None,
    patterns: tuple[str, ...] = (),
    unless: tuple[str, ...] = (),
    speaker: Speaker | None = None,
) -> tuple[Rule, ...]:
    """The rules with more patterns, or another reward, for the rule of that name. A new rule comes first."""
    rules = tuple(rules)
    known = next((rule for rule in rules if rule.name == name), None)
    if known is None:
        if reward is None or not patterns:
            raise BadRequest(f"the new rule {name!r} needs a reward and patterns")
        return (Rule(name, reward, speaker or "user", patterns, unless), *rules)
    changed = replace(
        known,
        reward=known.reward if reward is None else reward,
        patterns=(*known.patterns, *patterns),
        unless=(*known.unless, *unless),
        speaker=speaker or known.speaker,
    )
    return tuple(changed if rule is known else rule for rule in rules)


def first_evidence(rules: Iterable[Rule], state: NextState) -> Evidence | None:
    return next((found for rule in rules if (found := rule.evidence(state)) is not None), None)


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    for pattern in patterns:
        compiled(pattern)  # says which one is wrong
    whole = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(whole, re.IGNORECASE | re.MULTILINE) if patterns else None


def _read_part(text: str) -> str:
    """Apostrophes are plain ones."""
    prose = CODE.sub(" ", text).strip().replace("\u2019", "'")
    return prose if len(prose) <= READ_HEAD + READ_TAIL else f"{prose[:READ_HEAD]}\n…\n{prose[-READ_TAIL:]}"


def _excerpt(text: str, start: int) -> str:
    """The text around the place that fits."""
    first = max(0, start - LONGEST_EVIDENCE // 4)
    part = " ".join(text[first : first + LONGEST_EVIDENCE].split())
    return f"{'…' if first else ''}{part}{'…' if len(text) > first + LONGEST_EVIDENCE else ''}"


def _hint(text: str, end: int) -> str:
    """The wish that the user states; else the text behind the words that fit."""
    named = next((match["hint"] for pattern in HINTS if (match := pattern.search(text)) is not None), None)
    hint = (text[end:] if named is None else named).strip(" \t\n,.;:!-—\u2013\uff0c\u3002\uff01")
    return hint[:LONGEST_EVIDENCE] if len(hint) > 1 else ""


def _normal_words(text: str) -> list[str]:
    """Chinese characters count as words."""
    return re.findall(r"[a-z0-9']+|[\u4e00-\u9fff]", text.lower())


def _similarity(words: list[str], others: list[str]) -> float:
    return SequenceMatcher(None, words, others, autojunk=False).ratio()
