"""Counts what agents were answered against what a trainer gets: lost, twice, empty, truncated, and how late."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from stepwell.errors import FetchTimeout, LeaseExpired, PoolUnavailable
from stepwell.pool.client import PoolClient
from stepwell.pool.client.batch import Batch
from stepwell.steps.step import Step

FETCH_TIMEOUT = 3.0
"""Seconds that one fetch waits."""
PATIENCE = 60.0
"""Seconds without a step after which missing steps count as lost: a shard may still restart."""
TRAINERS = 4
"""Fetches at a time, while agents work."""
RETRY_PAUSE = 0.5
NOTHING_LOST: Mapping[str, float] = dict.fromkeys(
    ("empty_rollouts", "truncated_rollouts", "steps_lost", "steps_twice", "refused_rollouts"), 0
)
"""The goals of every row."""


@dataclass(slots=True)
class Auditor:
    """The trainer of a row, too: it takes every ready group and acknowledges it."""

    fetch_timeout: float = FETCH_TIMEOUT
    patience: float = PATIENCE
    answered: Counter[str] = field(default_factory=Counter)
    """Calls with a whole answer, by trajectory."""
    failed: int = 0
    """Calls without one."""
    refused: int = 0
    """Rollouts that a gateway refused to open or to complete, for good."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Of all answers to agents."""
    ended_at: dict[str, float] = field(default_factory=dict)
    """When the agent first asked to complete a trajectory."""
    completed: set[str] = field(default_factory=set)
    """Trajectories whose completion was confirmed."""
    slowest: float = 0.0
    """Seconds of the slowest answered call."""
    delivered: Counter[str] = field(default_factory=Counter)
    """Steps that the trainer got, by trajectory."""
    arrived_at: dict[str, float] = field(default_factory=dict)
    """When the trainer first got a trajectory."""
    uids: Counter[str] = field(default_factory=Counter)
    """How often the trainer got each step."""
    leases_lost: int = 0
    """Batches that were acknowledged too late: the trainer knows that they come again, and does not count them."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by `drain`: `follow` returns."""

    def note_call(self, trajectory_uid: str, is_answered: bool, seconds: float) -> None:
        if is_answered:
            self.answered[trajectory_uid] += 1
            self.slowest = max(self.slowest, seconds)
        else:
            self.failed += 1

    def note_completed(self, trajectory_uid: str) -> None:
        self.completed.add(trajectory_uid)

    def note_delivered(self, steps: Iterable[Step], at: float = 0.0) -> None:
        for step in steps:
            self._note_step(step.trajectory_uid, step.uid, at)

    async def follow(self, pool: PoolClient) -> None:
        """Train until `drain`, to measure how long delivery takes. A task of its own beside the agents. The next batch
        does not wait for an acknowledgement, as in our trainers."""
        async with asyncio.TaskGroup() as training:
            for _ in range(TRAINERS):
                training.create_task(self._train(pool, training))

    async def drain(self, pool: PoolClient) -> None:
        """Take everything that is ready, once all agents have ended."""
        self.stopped.set()
        seen_at = time.monotonic()
        while True:
            if (batch := await self._fetch(pool)) is not None:
                seen_at = time.monotonic()
                await self._acknowledge(pool, batch, seen_at)
            elif not self._has_missing() or time.monotonic() - seen_at > self.patience:
                return

    def delivery_p99(self, trajectory_uids: Collection[str] | None = None) -> float:
        """Seconds from the end of a rollout to its arrival at the trainer, among all or these completed rollouts."""
        counted = self.completed if trajectory_uids is None else self.completed.intersection(trajectory_uids)
        waits = sorted(self.arrived_at.get(uid, math.inf) - self.ended_at[uid] for uid in counted)
        return round(waits[math.ceil(0.99 * len(waits)) - 1], 3) if waits else math.inf

    def figures(self) -> dict[str, float]:
        calls = self.answered.total() + self.failed
        return {
            "calls": calls,
            "answered_percent": round(100 * self.answered.total() / max(1, calls), 2),
            "slowest_call_s": round(self.slowest, 2),
            "rollouts": len(self.completed),
            "refused_rollouts": self.refused,
            "empty_rollouts": sum(self.delivered[uid] == 0 for uid in self.completed),
            "truncated_rollouts": sum(0 < self.delivered[uid] < self.answered[uid] for uid in self.completed),
            "steps_lost": sum(self._missing_of(uid) for uid in self.completed),
            "steps_twice": sum(count - 1 for count in self.uids.values()),
            "leases_lost": self.leases_lost,
        }

    def _note_step(self, trajectory_uid: str, uid: str, at: float) -> None:
        self.delivered[trajectory_uid] += 1
        self.uids[uid] += 1
        self.arrived_at.setdefault(trajectory_uid, at)

    def _missing_of(self, uid: str) -> int:
        return max(0, self.answered[uid] - self.delivered[uid])

    def _has_missing(self) -> bool:
        return any(map(self._missing_of, self.completed))

    async def _train(self, pool: PoolClient, training: asyncio.TaskGroup) -> None:
        while not self.stopped.is_set():
            if (batch := await self._fetch(pool)) is not None:
                training.create_task(self._acknowledge(pool, batch, time.monotonic()))

    async def _fetch(self, pool: PoolClient) -> Batch | None:
        try:
            return await pool.fetch_batch(
                1, timeout=self.fetch_timeout, lease=60.0, min_exactness="retokenized", untrainable=True
            )
        except FetchTimeout:
            return None
        except PoolUnavailable:
            await asyncio.sleep(RETRY_PAUSE)
            return None

    async def _acknowledge(self, pool: PoolClient, batch: Batch, arrived: float) -> None:
        """Tried again while a shard is away. If the lease is lost, the batch comes again, and is not counted."""
        while True:
            try:
                await pool.ack(batch)
            except PoolUnavailable:
                await asyncio.sleep(RETRY_PAUSE)
                continue
            except LeaseExpired:
                self.leases_lost += 1
                return
            for trajectory_uid, uid in zip(batch.columns.trajectory_uids, batch.columns.uids, strict=True):
                self._note_step(trajectory_uid, uid, arrived)
            return
