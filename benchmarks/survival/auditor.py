"""Counts what agents were answered against what a trainer gets: lost, twice, empty, truncated."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepwell.errors import FetchTimeout
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step

FETCH_TIMEOUT = 3.0
"""Seconds without a ready group after which the pool counts as empty."""


@dataclass(slots=True)
class Auditor:
    fetch_timeout: float = FETCH_TIMEOUT
    answered: Counter[str] = field(default_factory=Counter)
    """Calls with a whole answer, by trajectory."""
    failed: int = 0
    """Calls without one."""
    completed: set[str] = field(default_factory=set)
    """Trajectories whose completion was confirmed."""
    slowest: float = 0.0
    """Seconds of the slowest answered call."""
    delivered: Counter[str] = field(default_factory=Counter)
    """Steps that the trainer got, by trajectory."""
    uids: Counter[str] = field(default_factory=Counter)
    """How often the trainer got each step."""

    def note_call(self, trajectory_uid: str, is_answered: bool, seconds: float) -> None:
        if is_answered:
            self.answered[trajectory_uid] += 1
            self.slowest = max(self.slowest, seconds)
        else:
            self.failed += 1

    def note_delivered(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.delivered[step.trajectory_uid] += 1
            self.uids[step.uid] += 1

    async def drain(self, pool: PoolClient) -> None:
        """Take everything that is ready, as a trainer does."""
        while True:
            try:
                batch = await pool.fetch_batch(
                    1, timeout=self.fetch_timeout, lease=60.0, min_exactness="retokenized", untrainable=True
                )
            except FetchTimeout:
                return
            self.note_delivered(step for group in batch.groups() for trajectory in group for step in trajectory)
            await pool.ack(batch)

    def figures(self) -> dict[str, float]:
        calls = self.answered.total() + self.failed
        return {
            "calls": calls,
            "answered_percent": round(100 * self.answered.total() / max(1, calls), 2),
            "slowest_call_s": round(self.slowest, 2),
            "rollouts": len(self.completed),
            "empty_rollouts": sum(self.delivered[uid] == 0 for uid in self.completed),
            "truncated_rollouts": sum(0 < self.delivered[uid] < self.answered[uid] for uid in self.completed),
            "steps_lost": sum(max(0, self.answered[uid] - self.delivered[uid]) for uid in self.completed),
            "steps_twice": sum(count - 1 for count in self.uids.values()),
        }
