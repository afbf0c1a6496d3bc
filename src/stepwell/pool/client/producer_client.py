"""How producers reach the shards: gateways, environments, and whoever gives rewards.

A call goes to the shard that has the group of its prompt_uid.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import overload

from stepwell.common.coalescing import BatchSender
from stepwell.errors import UnknownTrajectory
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import (
    FLUSH_WAIT,
    AbortCall,
    CompleteCall,
    EndResult,
    FlushNeeded,
    KnowsCall,
    MoveCall,
    ProducerAnswer,
    ProducerCall,
    RecordedTurn,
    Registration,
    RewardGiven,
    SubmitVerdict,
)
from stepwell.pool.api.sessions import SessionCall, SessionPlace
from stepwell.pool.client.flush_follower import FlushFollower
from stepwell.pool.client.group_routing import Rerouting, ask_any, ask_owner, ask_owners, rows_of, submit_to_owners
from stepwell.pool.client.shards import ShardClient, ShardSet
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import JsonObject, Step


class ProducerClient(ShardClient):
    """The part of StepSink and GroupExchange that is routed by prompt_uid."""

    def __init__(self, shards: ShardSet) -> None:
        super().__init__(shards)
        self._senders: dict[tuple[str, int], BatchSender[ProducerCall, ProducerAnswer]] = {}
        """By shard and revision of the plan."""
        shards.on_new_plan.append(lambda _: self._senders.clear())
        self._flushes = FlushFollower(shards)

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        return await self._send(KnowsCall(trajectory_uid, prompt_uid, self._flushes.gateway))

    async def channel_of(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        return await self._send(KnowsCall(trajectory_uid, prompt_uid, is_ended_too=True))

    async def place_session(self, call: SessionCall) -> SessionPlace | None:
        return await self._send(replace(call, gateway=self._flushes.gateway))

    async def find_session(self, user: str, replied: str) -> str:
        """Only the shards that answer soon are asked."""
        answer = await self.shards.ask_all(lambda shard: shard.find_session(user, replied))
        return next(filter(None, answer.parts), "")

    async def register_trajectory(self, registration: Registration) -> None:
        await self._send(replace(registration, gateway=self._flushes.gateway))

    async def move_trajectory(self, trajectory_uid: str, prompt_uid: str, to_prompt_uid: str) -> None:
        await self.register_trajectory(await self._send(MoveCall(trajectory_uid, prompt_uid, to_prompt_uid)))

    async def turns(self, trajectory_uid: str, prompt_uid: str, replied: str) -> list[RecordedTurn]:
        async def ask(shard: str, plan: PoolPlan) -> list[RecordedTurn]:
            gateway = self._flushes.gateway
            return await self.shards.at(shard).turns(trajectory_uid, prompt_uid, replied, gateway, **plan.stamp)

        return await ask_owners(self.shards, prompt_uid, ask)

    async def step_extras(self, trajectory_uid: str, prompt_uid: str, name: str, uid: str) -> dict[str, JsonObject]:
        async def ask(shard: str, plan: PoolPlan) -> dict[str, JsonObject]:
            owner, gateway = self.shards.at(shard), self._flushes.gateway
            return await owner.step_extras(trajectory_uid, prompt_uid, name, uid, gateway, **plan.stamp)

        return await ask_owners(self.shards, prompt_uid, ask)

    async def pool_uid(self) -> str:
        return (await self.shards.plan()).uid

    async def shard_finder(self) -> Callable[[str], str]:
        plan = await self.shards.plan()
        return lambda prompt_uid: plan.owners(prompt_uid)[0]

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        async def submit(shard: str, indexes: list[int], plan: PoolPlan) -> list[SubmitVerdict]:
            own = replace(pack([steps[index] for index in indexes]), sent_at=time.time())
            return await self.shards.at(shard).submit_steps(own, channel, group_size, **plan.stamp)

        return await submit_to_owners(self.shards, [step.prompt_uid for step in steps], submit)

    async def submit_groups(self, steps: Sequence[Step], registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        return await self.submit_columns(pack(steps), registrations)

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        """One message to each shard. If all steps belong to one shard, nothing is copied."""

        async def submit(shard: str, indexes: list[int], plan: PoolPlan) -> list[SubmitVerdict]:
            uids = {columns.trajectory_uids[index] for index in indexes}
            registered = [one for one in registrations if one.trajectory_uid in uids]
            return await self.shards.at(shard).submit_groups(rows_of(columns, indexes), registered, **plan.stamp)

        return await submit_to_owners(self.shards, columns.prompt_uids, submit)

    async def give_reward(self, reward: RewardGiven) -> bool:
        timeout = self.shards.timeout + (FLUSH_WAIT if reward.step_index is not None else 0.0)
        reward = replace(reward, gateway=self._flushes.gateway)

        async def give(shard: str, plan: PoolPlan) -> bool:
            return await self.shards.at(shard, timeout=timeout).give_reward(reward, **plan.stamp)

        try:
            return await ask_owner(self.shards, reward.prompt_uid, give, Rerouting(self.shards, timeout))
        except UnknownTrajectory as unknown:
            return await ask_any(self.shards, give, unknown)

    async def complete_trajectory(
        self, trajectory_uid: str, prompt_uid: str, reward: float | None, failure: str = ""
    ) -> EndResult:
        call = CompleteCall(trajectory_uid, prompt_uid, reward, failure, self._flushes.gateway)
        try:
            return await self._send(call)
        except FlushNeeded:
            rerouting = Rerouting(self.shards, FLUSH_WAIT + self.shards.timeout)
            return await ask_owner(self.shards, prompt_uid, partial(self._complete_flushed, call), rerouting)

    async def follow_flushes(self, flush: Callable[[str], Awaitable[None]], gateway: str = "") -> None:
        await self._flushes.run(flush, gateway)

    async def stop_serving(self) -> None:
        await self._flushes.leave()

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        return await self._send(AbortCall(trajectory_uid, prompt_uid))

    @overload
    async def _send(self, call: KnowsCall) -> str | None: ...
    @overload
    async def _send(self, call: Registration) -> None: ...
    @overload
    async def _send(self, call: MoveCall) -> Registration: ...
    @overload
    async def _send(self, call: CompleteCall | AbortCall) -> EndResult: ...
    @overload
    async def _send(self, call: SessionCall) -> SessionPlace | None: ...

    async def _send(self, call: ProducerCall) -> ProducerAnswer:
        """Send a call to the group's shard, in a message that it shares with other calls."""
        rerouting = Rerouting(self.shards)
        try:
            async with asyncio.timeout(self.shards.timeout):
                ask = ask_owners if isinstance(call, KnowsCall) else ask_owner
                return await ask(self.shards, call.prompt_uid, partial(self._send_to, call), rerouting)
        except TimeoutError:
            raise rerouting.failure() from None

    async def _send_to(self, call: ProducerCall, shard: str, plan: PoolPlan) -> ProducerAnswer:
        async def send(calls: list[ProducerCall]) -> Sequence[ProducerAnswer | Exception]:
            return await self.shards.at(shard).answer(calls, **plan.stamp)

        sender = self._senders.setdefault((shard, plan.revision), BatchSender(send))
        return await sender.submit(call)

    async def _complete_flushed(self, call: CompleteCall, shard: str, plan: PoolPlan) -> EndResult:
        calls = self.shards.at(shard, timeout=FLUSH_WAIT + self.shards.timeout)
        return await calls.complete_flushed(call, FLUSH_WAIT, **plan.stamp)
