"""A pool for a training loop in the test's own process: the real rules, plain calls, and time that stands still."""

from collections.abc import Sequence
from typing import Any

from stepwell.errors import FetchTimeout, LeaseExpired
from stepwell.pool.api.leasing import BatchRequest, HasLeases, Settlement
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.step import Step
from tests.builders import EasyPool

SHARD = "data_pool"


class TrainingPool:
    def __init__(self, **limits: Any) -> None:
        self.rules = EasyPool(Limits(**limits))
        self.acknowledged: list[str] = []
        self.given_back: list[str] = []
        self.dies_at_ack = False
        """As when the trainer is killed before its acknowledgement has left."""

    def add_group(self, prompt: str, rollouts: Sequence[tuple[Sequence[Step], float | None]]) -> None:
        for steps, reward in rollouts:
            uid = steps[0].trajectory_uid
            self.rules.register(Registration(uid, prompt, group_size=len(rollouts)))
            assert self.rules.submit(steps) == [SubmitVerdict.ACCEPTED] * len(steps)
            assert self.rules.complete(uid, prompt, reward) is EndResult.COMPLETED

    def fetch_batch(self, count: int, *, timeout: float, lease: float | None, channel: str) -> Batch:
        leased = self.rules.lease(count, channel, seconds=lease or 0.0)
        if leased is None:
            raise FetchTimeout(self.rules.waiting_for(BatchRequest(count=count, channel=channel)))
        uid, taken = leased
        return make_batch(taken.columns, taken.group_sizes, leases=((SHARD, uid),))

    def ack(self, batch: HasLeases) -> None:
        if self.dies_at_ack:
            raise KeyboardInterrupt
        settled = [self.rules.leasing.ack(lease) for _, lease in batch.leases]
        self.acknowledged += [lease for _, lease in batch.leases]
        if Settlement.EXPIRED in settled:
            raise LeaseExpired("too late")

    def nack(self, batch: HasLeases) -> None:
        for _, lease in batch.leases:
            self.rules.leasing.nack(lease)
            self.given_back.append(lease)

    def set_policy_version(self, version: int) -> None:
        self.rules.policy_version = version

    def stats(self) -> PoolStats:
        return self.rules.stats()

    @property
    def held(self) -> int:
        """Groups that no one has acknowledged."""
        return self.stats().channels["train"].held.steps
