"""Validation: at intervals of policy versions, each prompt of a dataset once, on a channel of its own."""

import time
from dataclasses import dataclass, field

from stepwell.agents.dataset import Dataset
from stepwell.agents.rollout import AgentFlow, RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    flow: AgentFlow
    """A flow on another channel than training, with its own group size and possibly another agent."""
    dataset: Dataset
    every: int = 10
    """Policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    policy_version: int | None
    """The version at the start of the round; None if no engine reports a number. The weights may change during a
    round."""
    mean_reward: float | None
    """The mean over the rollouts that their agent scored; None if there is none."""
    scored: int
    completed: int
    failed: int
    """Failed attempts, including those that were retried."""
    seconds: float


@dataclass(slots=True)
class ValidationRound:
    """A validation in progress."""

    policy_version: int | None
    started: float = field(default_factory=time.monotonic)
    results: list[RolloutResult] = field(default_factory=list)

    def report(self) -> ValidationReport:
        rewards = [result.reward for result in self.results if result.reward is not None]
        completed = sum(result.is_completed for result in self.results)
        return ValidationReport(
            policy_version=self.policy_version,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            scored=len(rewards),
            completed=completed,
            failed=len(self.results) - completed,
            seconds=time.monotonic() - self.started,
        )
