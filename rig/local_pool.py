"""The real client and the real shards of a pool in the test's own process, without Ray.

Unless a clock is given, time stands still: leases and deadlines end when a test calls `advance_to`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stepwell.pool.slices.producing import AddGroups, AddSteps

from rig.builders import EasyPool
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.transport import ActorAway
from stepwell.pool.client import PoolClient
from stepwell.pool.client.in_process import InProcessTransport
from stepwell.pool.client.shards import PART_TIMEOUT
from stepwell.pool.shard.service import ShardService
from stepwell.steps.step import Exactness, Step


class LocalTransport(InProcessTransport):
    """Calls shards of this process, with switches for failures."""

    def __init__(self, services: dict[str, ShardService]) -> None:
        super().__init__(services)
        self.away = False
        """No call reaches a shard, as if there were no pool."""
        self.shards_away: set[str] = set()
        """These do not run now, as after a kill."""
        self.shards_stopped: set[str] = set()
        """These do not answer for now, as after SIGSTOP."""
        self.loses_answers = 0
        """How many submissions are still taken without an answer, as by an actor that dies too early."""
        self.messages: list[int] = []
        """How many steps each submission had."""
        self.takes: list[str] = []
        """The calls that took data or acknowledged it, by their names."""

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.away:
            raise PoolUnavailable("the pool is away")
        if shard in self.shards_away:
            raise ActorAway("killed")
        while shard in self.shards_stopped:
            await asyncio.sleep(0.005)
        if method.startswith(("take", "ack")):
            self.takes.append(method)
        answer = await super().call(shard, method, args, kwargs)
        asked = args[0] if method == "run" else []
        submitted = [operation for operation in asked if isinstance(operation, AddSteps | AddGroups)]
        if submitted:
            self.messages.append(sum(len(operation.steps) for operation in submitted))
            if self.loses_answers:
                self.loses_answers -= 1
                raise PoolUnavailable("the answer was lost")
        return answer


class LocalPool(PoolClient):
    """A pool in memory, of one shard unless told otherwise."""

    def __init__(
        self,
        *,
        shards: int = 1,
        transport: type[LocalTransport] = LocalTransport,
        clock: Callable[[], float] | None = None,
        timeout: float = 30.0,
        part_timeout: float = PART_TIMEOUT,
        heartbeat_interval: float = 2.5,
        heartbeat_timeout: float = 10.0,
        uid: str = "",
        **limits: Any,
    ) -> None:
        self._now = 0.0
        self.plan = PoolPlan(shards=shards, limits=Limits(**limits), uid=uid)
        time = clock or (lambda: self._now)
        self._new_shard = partial(
            ShardService,
            clock=time,
            monotonic=time,
            recheck_interval=0.01,
            heartbeat_timeout=heartbeat_timeout,
            ask_decision=lambda shard, uid: self.transport.call(shard, "nack", (uid,), {}),
        )
        services = {name: self._new_shard(self.plan, name) for name in self.plan.shard_names()}
        self.transport: Any = transport(services)
        """A LocalTransport, or the given subclass of it."""
        super().__init__(
            self.plan.name,
            transport=self.transport,
            timeout=timeout,
            part_timeout=part_timeout,
            heartbeat_interval=heartbeat_interval,
        )
        self.rules = EasyPool.over(services[self.plan.name].pool)
        """Of the first shard."""

    def add_shards(self, plan: PoolPlan, changed: PoolPlan | None = None) -> None:
        """Start the shards of a plan that do not run yet, or those of one that is to change it. They follow `plan`."""
        for name in (changed or plan).shard_names():
            if name not in self.transport.services:
                self.transport.services[name] = self._new_shard(plan, name)

    @property
    def away(self) -> bool:
        return bool(self.transport.away)

    @away.setter
    def away(self, away: bool) -> None:
        self.transport.away = away

    def advance_to(self, now: float) -> None:
        self._now = now
        for service in self.transport.services.values():
            service.pool.advance(now)

    def taken(self, channel: str = "train") -> list[Step]:
        """The steps of the oldest ready group, also those that a trainer would leave out."""
        groups = self.rules.take(1, channel, untrainable=True, min_exactness=Exactness.RETOKENIZED)
        assert groups is not None, self.rules.waiting_for(BatchRequest(count=1, channel=channel))
        return groups[0]
