"""What was sampled in one session, turn by turn, and which turns make one sequence. Pure: it neither asks nor waits.

A turn continues a line if its prompt begins with every token of it; where none fits (a template that strips thinking,
a history told anew, another conversation) it begins a line of its own. What always holds: no turn is lost, and every
turn stands in at least one line, in the order in which they were taken. Several answers to one prompt, be they choices
of one call or of several calls, are lines beside one another, each with all that came before: each is a rollout.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepwell.steps.step import Exactness, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Turn:
    """One choice of an answer."""

    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray | None
    """As many as response ids; None where the server gave none."""
    exactness: Exactness
    finish_reason: str | None = None
    policy_version: int | None = None
    """Of the oldest token; None where the server does not say."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Turns that extend one another. The tokens of its last turn are those of all."""

    turns: tuple[Turn, ...]
    tokens: bytes
    """Of int32, for comparing bytes stops at the first difference."""


class Lines:
    def __init__(self) -> None:
        self._all: list[Line] = []
        self._ends: list[Line] = []

    @property
    def ends(self) -> Sequence[Line]:
        """The lines that no turn has continued, in the order in which they were begun."""
        return tuple(self._ends)

    def add(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            self._add(turn)

    def clear(self) -> None:
        self._all.clear()
        self._ends.clear()

    def _add(self, turn: Turn) -> None:
        prompt = turn.prompt_ids.tobytes()
        before = self._longest(prompt)
        line = Line((*(before.turns if before else ()), turn), prompt + turn.response_ids.tobytes())
        self._all.append(line)
        if before in self._ends:
            self._ends[self._ends.index(before)] = line
        else:
            self._ends.append(line)

    def _longest(self, prompt: bytes) -> Line | None:
        """The longest line that a prompt begins with; of equals the newest."""
        fitting = (line for line in reversed(self._all) if prompt.startswith(line.tokens))
        return max(fitting, key=lambda line: len(line.tokens), default=None)
