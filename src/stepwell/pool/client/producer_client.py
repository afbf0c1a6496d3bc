"""How producers reach the shards: gateways, environments, and whoever gives rewards."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stepwell.errors import UnknownTrajectory
from stepwell.pool.api.calls import CallBegun, HeldCalls
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, RecordedTurn, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.sessions import SessionCall, SessionPlace
from stepwell.pool.client.asking import AskingClient
from stepwell.pool.client.flush_follower import FlushFollower
from stepwell.pool.client.group_routing import ask_any, rows_of, submit_to_owners
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.shard.operation import Operation
from stepwell.pool.slices.calls import BeginCall, EndCall, MarkUnseen
from stepwell.pool.slices.sessions import FindSession, PlaceSession
from stepwell.pool.slices.steps import AddGroups, AddSteps, GiveReward
from stepwell.pool.slices.trajectories import (
    Abort,
    ChannelIfOpen,
    ChannelOf,
    Complete,
    FindStepExtras,
    FindTurns,
    MoveTrajectory,
    Register,
)
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import JsonObject, Step


class ProducerClient(AskingClient):
    """The part of StepSink and GroupExchange that is routed by prompt_uid."""

    def __init__(self, shards: ShardSet) -> None:
        super().__init__(shards)

        async def ask_shard(operation: Operation[Any], shard: str) -> Any:
            return await self.ask_at(operation, shard, await shards.plan())

        self._flushes = FlushFollower(shards, ask_shard)

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        return await self.ask(ChannelIfOpen(trajectory_uid, prompt_uid, self._flushes.gateway))

    async def channel_of(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        return await self.ask(ChannelOf(trajectory_uid, prompt_uid))

    async def place_session(self, call: SessionCall) -> SessionPlace | None:
        return await self.ask(PlaceSession(replace(call, gateway=self._flushes.gateway)))

    async def find_session(self, user: str, replied: str) -> str:
        return await self.ask(FindSession(user, replied))

    async def register_trajectory(self, registration: Registration) -> None:
        await self.ask(Register(replace(registration, gateway=self._flushes.gateway)))

    async def move_trajectory(self, trajectory_uid: str, prompt_uid: str, to_prompt_uid: str) -> None:
        await self.register_trajectory(await self.ask(MoveTrajectory(trajectory_uid, prompt_uid, to_prompt_uid)))

    async def turns(self, trajectory_uid: str, prompt_uid: str, replied: str) -> list[RecordedTurn]:
        return await self.ask(FindTurns(trajectory_uid, prompt_uid, replied, self._flushes.gateway))

    async def step_extras(self, trajectory_uid: str, prompt_uid: str, name: str, uid: str) -> dict[str, JsonObject]:
        return await self.ask(FindStepExtras(trajectory_uid, prompt_uid, name, uid, self._flushes.gateway))

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
            return await self.ask_at(AddSteps(own, channel, group_size), shard, plan)

        return await submit_to_owners(self.shards, [step.prompt_uid for step in steps], submit)

    async def submit_groups(self, steps: Sequence[Step], registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        return await self.submit_columns(pack(steps), registrations)

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        """One message to each shard. If all steps belong to one shard, nothing is copied."""

        async def submit(shard: str, indexes: list[int], plan: PoolPlan) -> list[SubmitVerdict]:
            uids = {columns.trajectory_uids[index] for index in indexes}
            registered = [one for one in registrations if one.trajectory_uid in uids]
            return await self.ask_at(AddGroups(rows_of(columns, indexes), registered), shard, plan)

        return await submit_to_owners(self.shards, columns.prompt_uids, submit)

    async def give_reward(self, reward: RewardGiven) -> bool:
        give = GiveReward(replace(reward, gateway=self._flushes.gateway))
        try:
            return await self.ask(give)
        except UnknownTrajectory as unknown:
            return await ask_any(self.shards, partial(self.ask_at, give), unknown)

    async def complete_trajectory(
        self, trajectory_uid: str, prompt_uid: str, reward: float | None, failure: str = ""
    ) -> EndResult:
        gateway = self._flushes.gateway
        return await self.ask(Complete(trajectory_uid, prompt_uid, reward, failure, gateway))

    async def begin_call(self, call: CallBegun) -> None:
        await self.ask(BeginCall(replace(call, gateway=self._flushes.gateway)))

    async def end_call(self, trajectory_uid: str, prompt_uid: str, uid: str, *, is_lost: bool) -> None:
        await self.ask(EndCall(trajectory_uid, prompt_uid, uid, is_lost))

    async def follow_flushes(
        self, flush: Callable[[str], Awaitable[None]], held: Callable[[], HeldCalls] = HeldCalls, gateway: str = ""
    ) -> None:
        await self._flushes.run(flush, held, gateway)

    async def stop_serving(self) -> None:
        await self._flushes.leave()

    async def mark_unseen(self, trajectory_uid: str, prompt_uid: str, step_uids: Sequence[str], reason: str) -> None:
        await self.ask(MarkUnseen(trajectory_uid, prompt_uid, step_uids, reason))

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        return await self.ask(Abort(trajectory_uid, prompt_uid))
