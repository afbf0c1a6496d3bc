"""What judging a trajectory gives.

What always holds: a failure is an Outcome of its own and carries no score, so that an error is never mistaken for 0;
every number of a Score is finite.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How an attempt at a score ended."""

    SCORE = "score"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function may give instead of a bare number."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the value is made of, by name; for people to look at."""
    step_rewards: tuple[float | None, ...] = ()
    """One a step, in the trajectory's order; None leaves that step as it is. Empty: steps have no rewards of their
    own."""
    notes: str = ""
    """Why, in words."""

    @property
    def rest(self) -> float:
        """What the steps' own rewards leave of the value; it goes to the last step that is trained."""
        return self.value - sum(reward for reward in self.step_rewards if reward is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One attempt at scoring one trajectory, as a reward worker tells the pool of it."""

    trajectory_uid: str
    prompt_uid: str
    ticket: str
    """The lease it answers."""
    outcome: Outcome
    score: Score | None
    """There if, and only if, the outcome is SCORE."""
    why: str = ""
    """What went wrong, in words."""
    source: str
    """The reward function's name."""
    seconds: float
    """How long it took."""
