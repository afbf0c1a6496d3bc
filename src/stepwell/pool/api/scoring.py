"""What reward workers and reward functions answer.

- A failure is a JudgementOutcome of its own and carries no score: an error is never mistaken for 0.
- Every number of a Score is finite.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from stepwell.common.message_format import message, sent
from stepwell.steps.step import JsonObject


@sent
class JudgementOutcome(StrEnum):
    """How an attempt at a score ended."""

    SCORE = "score"
    ERROR = "error"
    TIMEOUT = "timeout"


@message
@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function may return instead of a bare number."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the value is made of, by name. For people to read."""
    step_rewards: tuple[float | None, ...] = ()
    """One per step, in the trajectory's order; None keeps that step's reward. Empty: no step has its own reward."""
    notes: str = ""
    """The reason, in words."""
    step_details: tuple[Mapping[str, str] | None, ...] = ()
    """One per step: the evidence of its reward, or why it gets none. None: nothing can be said of it yet. Empty: no
    step has its own."""
    steps_only: bool = False
    """Only steps are rewarded: there is no outcome reward. Without a step reward either, the function abstains."""

    @property
    def outcome(self) -> float | None:
        """The outcome reward."""
        return None if self.steps_only else self.rest

    @property
    def is_abstention(self) -> bool:
        return self.steps_only and all(reward is None for reward in self.step_rewards)

    @property
    def rest(self) -> float:
        """The value without the steps' own rewards: the outcome reward."""
        return self.value - sum(reward for reward in self.step_rewards if reward is not None)


@message
@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one call of a reward function."""

    outcome: JudgementOutcome
    score: Score | None = None
    """Set if, and only if, the outcome is SCORE."""
    why: str = ""
    """What went wrong, in words."""
    seconds: float = 0.0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One attempt at scoring one trajectory, as a reward worker reports it to the pool."""

    trajectory_uid: str
    prompt_uid: str
    lease_uid: str
    """The reward lease that it answers."""
    attempt: Attempt
    source: str
    """The reward function's name."""
    steps: tuple[str, ...] = ()
    """The identities of the steps that the worker saw, in order. Empty: all that the pool holds."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """What a reward is computed from. The texts are decoded from the ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    prompt_text: str
    response_text: str
    num_turns: int
    extra_fields: JsonObject = field(default_factory=dict)
    dataset_fields: JsonObject = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class RewardScore:
    reward_score: float
    reward_extra_info: JsonObject


class RewardScorer(Protocol):
    """A reward worker, as a gateway sees it. A failure raises RewardFailed; it is never a score of zero."""

    async def compute_reward(self, request: RewardRequest) -> RewardScore: ...

    async def check(self) -> None: ...
