"""What a rollouter has done so far."""

from collections import Counter, deque
from dataclasses import dataclass, field

from stepwell.agents.rollout import RolloutResult

LAST = 200
"""Rewards in the mean."""


@dataclass(slots=True)
class RolloutCounts:
    groups: int = 0
    """Complete groups for training."""
    given_up: int = 0
    """Groups in which a rollout failed after all its retries."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """By status."""
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    """The last rewards of rollouts for training."""
    why: str = ""
    """The last failure."""

    def add(self, result: RolloutResult, *, is_validation: bool) -> None:
        self.rollouts[result.status] += 1
        if result.reward is not None and not is_validation:
            self.rewards.append(result.reward)
        if not result.is_completed:
            self.why = f"{result.status}: {result.why}" if result.why else str(result.status)

    def line(self, running: int, seconds: float) -> str:
        """One line for the terminal."""
        total = self.rollouts.total()
        parts = [
            f"{self.groups} groups",
            f"{total} rollouts ({total / max(seconds, 1e-9):.1f}/s)",
            f"{running} running",
        ]
        if self.rewards:
            parts.append(f"reward {sum(self.rewards) / len(self.rewards):.3f}")
        if self.given_up:
            parts.append(f"{self.given_up} groups given up")
        if failed := total - self.rollouts["completed"]:
            parts.append(f"{failed} not completed (last: {self.why[:100]})")
        return ", ".join(parts)
