"""The real DataPool over a pool in the test's own process. Time stands still. Leases are named by their order."""

from collections.abc import Sequence
from typing import Any

from rig.local_pool import LocalPool
from stepwell.pool.api.leasing import HasLeases
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import DataPool
from stepwell.pool.client.batch import Batch
from stepwell.steps.step import Step

FETCH_TIMEOUT = 0.02
"""Seconds. Tests fill the pool before they fetch."""


class TrainingPool(DataPool):
    def __init__(self, **limits: Any) -> None:
        self.local = LocalPool(**limits)
        super().__init__(self.local)
        self.leases: list[str] = []
        """All that were begun."""
        self.acknowledged: list[str] = []
        self.given_back: list[str] = []
        self.dies_at_ack = False
        """As when the trainer is killed before its acknowledgement has left."""

    def add_group(self, prompt: str, rollouts: Sequence[tuple[Sequence[Step], float | None]]) -> None:
        for steps, reward in rollouts:
            uid = steps[0].trajectory_uid
            self._run(self.local.register_trajectory(Registration(uid, prompt, group_size=len(rollouts))))
            assert self._run(self.local.submit_steps(steps)) == [SubmitVerdict.ACCEPTED] * len(steps)
            assert self._run(self.local.complete_trajectory(uid, prompt, reward)) is EndResult.COMPLETED

    def fetch_batch(self, count: int, *, timeout: float = 0.0, lease: float | None = None, **terms: Any) -> Batch:
        batch = super().fetch_batch(count, timeout=min(timeout, FETCH_TIMEOUT), lease=lease, **terms)
        self.leases += [uid for _, uid in batch.leases]
        return batch

    def fetch_ready(self, most: int, *, lease: float, **terms: Any) -> list[Batch]:
        batches = super().fetch_ready(most, lease=lease, **terms)
        self.leases += [uid for batch in batches for _, uid in batch.leases]
        return batches

    def ack(self, leased: HasLeases) -> None:
        if self.dies_at_ack:
            raise KeyboardInterrupt
        self.acknowledged += self._names(leased)
        super().ack(leased)

    def nack(self, leased: HasLeases) -> None:
        self.given_back += self._names(leased)
        super().nack(leased)

    def advance_to(self, now: float) -> None:
        async def advance() -> None:
            self.local.advance_to(now)

        self._run(advance())

    @property
    def held(self) -> int:
        """Steps that no one has acknowledged."""
        return self.stats().channels["train"].held.steps

    def _names(self, leased: HasLeases) -> list[str]:
        return [f"lease-{self.leases.index(uid) + 1}" for _, uid in leased.leases]
