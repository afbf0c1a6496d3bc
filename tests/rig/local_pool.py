"""The real client and the real shards of a pool in the test's own process, without Ray.

Time stands still: leases and deadlines end when a test calls `advance_to`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.service import ShardService
from stepwell.steps.step import Exactness, Step
from tests.builders import EasyPool


class LocalTransport:
    """Calls shards of this process, with switches for failures."""

    def __init__(self, services: Mapping[str, ShardService]) -> None:
        self.away = False
        """No call reaches a shard."""
        self.loses_answers = 0
        """How many submissions are still taken without an answer, as by an actor that dies too early."""
        self.messages: list[int] = []
        """How many steps each submission had."""
        self._services = services

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.away:
            raise PoolUnavailable("the pool is away")
        answer = await getattr(self._services[shard], method)(*args, **kwargs)
        if method in ("submit_steps", "submit_groups"):
            self.messages.append(len(args[0]))
            if self.loses_answers:
                self.loses_answers -= 1
                raise PoolUnavailable("the answer was lost")
        return answer


class LocalPool(PoolClient):
    """A pool of one shard in memory. `clock` lets time pass."""

    def __init__(self, *, clock: Callable[[], float] | None = None, **limits: Any) -> None:
        self._now = 0.0
        plan = PoolPlan(limits=Limits(**limits))
        service = ShardService(plan, plan.name, clock=clock or (lambda: self._now), recheck_interval=0.01)
        self.transport = LocalTransport({plan.name: service})
        super().__init__(plan.name, transport=self.transport)
        self.rules = EasyPool.over(service.pool)

    @property
    def away(self) -> bool:
        return self.transport.away

    @away.setter
    def away(self, away: bool) -> None:
        self.transport.away = away

    def advance_to(self, now: float) -> None:
        self._now = now
        self.rules.advance(now)

    def taken(self, channel: str = "train") -> list[Step]:
        """The steps of the oldest ready group, also those that a trainer would leave out."""
        groups = self.rules.take(1, channel, untrainable=True, min_exactness=Exactness.RETOKENIZED)
        assert groups is not None, self.rules.waiting_for(BatchRequest(count=1, channel=channel))
        return groups[0]
