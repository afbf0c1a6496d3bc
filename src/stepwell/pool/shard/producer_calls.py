"""The calls of producers to a shard: trajectories begin and end, steps and rewards arrive."""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import assert_never

from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.pacing import Pacing
from stepwell.pool.api.producing import (
    FLUSH_WAIT,
    TRAIN,
    TURN_WAIT,
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
from stepwell.pool.api.shard_layout import GroupElsewhere
from stepwell.pool.shard.gateway_roster import GatewayRoster
from stepwell.pool.shard.late_rewards import LateReward
from stepwell.pool.shard.session_watch import SessionWatch
from stepwell.pool.shard.transactions import ShardCalls, ShardTransactions
from stepwell.pool.state.records import Trajectory
from stepwell.steps.columns import Columns
from stepwell.steps.step import JsonObject

log = logging.getLogger("stepwell.pool")


class ProducerCalls(ShardCalls):
    def __init__(self, transactions: ShardTransactions) -> None:
        super().__init__(transactions)
        self._gateways = GatewayRoster(self.pool.state.gateways, transactions.monotonic)
        self._session_watch = SessionWatch(
            self.pool.state.limits.session_idle, transactions.recheck_interval, self._end_idle
        )
        self._asked_idle: set[str] = set()
        """Idle trajectories of sessions whose gateways are asked for what they hold."""
        transactions.before_commit.append(self._watch_sessions)

    async def answer(
        self, calls: Sequence[ProducerCall], revision: int | None = None
    ) -> list[ProducerAnswer | Exception]:
        """One answer for each call, or the exception by which it is refused.

        Here and below, `revision` is that of the plan by which the caller has chosen this shard.
        """
        self._transactions.check_routed(revision)
        shortage = self._transactions.disk_shortage()
        async with self._transactions.transaction():
            answers = [self._answer(call, shortage) for call in calls]
        if any(isinstance(call, CompleteCall) for call in calls):
            await self._transactions.notify()
        return answers

    async def flush_requests(self, gateway: str, timeout: float) -> list[str]:
        """The trajectories of which this gateway must send all steps that it holds. Waits until there are some."""
        self._transactions.check_open()
        if self._gateways.ends_gap(gateway):
            self.pool.state.forget_gateways()
        self._note_gateway(gateway)
        self._watch_sessions()
        requested = await self._gateways.requests(gateway, timeout)
        self._transactions.check_open()
        return requested

    async def flushed(self, gateway: str, trajectory_uids: Sequence[str]) -> None:
        """The gateway holds no step of these trajectories."""
        self._transactions.check_open()
        for trajectory in filter(None, map(self.pool.state.trajectories.get, trajectory_uids)):
            self.pool.state.set_gateways(trajectory, self._gateways.holders(trajectory, but=gateway))
        self._gateways.notify()

    async def leave(self, gateway: str) -> None:
        """The gateway ends, and holds nothing."""
        self._transactions.check_open()
        self._gateways.leave(gateway)
        self.pool.state.set_living_gateways(self._gateways.living())

    async def complete_flushed(self, call: CompleteCall, timeout: float, revision: int | None = None) -> EndResult:
        """Complete a trajectory as soon as no other living gateway holds steps of it."""
        self._transactions.check_routed(revision)
        deadline = time.monotonic() + timeout
        await self._await_flushes(call.trajectory_uid, call.gateway, timeout)
        (answer,) = await self.answer([call], self._transactions.plan.revision)
        if isinstance(answer, FlushNeeded):  # a gateway has come since
            return await self.complete_flushed(call, max(0.0, deadline - time.monotonic()), revision)
        if isinstance(answer, Exception):
            raise answer
        return EndResult(str(answer))

    async def submit_steps(
        self,
        steps: Columns,
        channel: str | None = None,
        group_size: int | None = None,
        revision: int | None = None,
    ) -> list[SubmitVerdict]:
        self._transactions.check_routed(revision)
        self._transactions.check_room()
        submit = self.pool.ingest.submit
        return await self._transactions.change(lambda: submit(steps, channel=channel, group_size=group_size))

    async def submit_groups(
        self, steps: Columns, registrations: Sequence[Registration], revision: int | None = None
    ) -> list[SubmitVerdict]:
        self._transactions.check_routed(revision)
        self._transactions.check_room()
        return await self._transactions.change(lambda: self.pool.ingest.submit_groups(steps, registrations))

    async def find_session(self, user: str, replied: str) -> str:
        """The id of this user's session that has a step whose conversation has this digest; empty if there is none."""
        self._transactions.check_open()
        return self.pool.state.sessions.find_by_turn(user, replied)

    async def turns(
        self, trajectory_uid: str, prompt_uid: str, replied: str, gateway: str = "", revision: int | None = None
    ) -> list[RecordedTurn]:
        """The steps that a call with this history may continue. If there is none, and another gateway than this one may
        hold it, that gateway is asked for it."""
        self._check_is_here(trajectory_uid, prompt_uid, revision)
        found = self.pool.ingest.turns(trajectory_uid, prompt_uid, replied)
        if not found and self._holders(trajectory_uid, gateway):
            with suppress(PoolUnavailable):
                await self._await_flushes(trajectory_uid, gateway, TURN_WAIT)
            found = self.pool.ingest.turns(trajectory_uid, prompt_uid, replied)
        return found

    async def step_extras(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        name: str,
        uid: str,
        gateway: str = "",
        revision: int | None = None,
    ) -> dict[str, JsonObject]:
        """What a trajectory's steps have under this name in their extras. If the step `uid` is not among them, and
        another gateway than this one may hold it, that gateway is asked for it."""
        self._check_is_here(trajectory_uid, prompt_uid, revision)
        found = self.pool.ingest.step_extras(trajectory_uid, prompt_uid, name)
        if uid not in found and self._holders(trajectory_uid, gateway):
            with suppress(PoolUnavailable):
                await self._await_flushes(trajectory_uid, gateway, TURN_WAIT)
            found = self.pool.ingest.step_extras(trajectory_uid, prompt_uid, name)
        return found

    async def give_reward(self, reward: RewardGiven, revision: int | None = None) -> bool:
        """True if the reward is kept: for training or, if its trajectory was already shipped, in the archive.

        The reward of a step waits until the other gateways of the trajectory have sent what they hold of it.
        """
        self._check_is_here(reward.trajectory_uid, reward.prompt_uid, revision)
        if reward.step_index is not None:
            await self._await_flushes(reward.trajectory_uid, reward.gateway, FLUSH_WAIT)
        if self.pool.ingest.is_forgotten(reward.trajectory_uid, reward.prompt_uid):
            return False
        async with self._transactions.transaction():
            kept = self.pool.ingest.reward(reward)
            if not kept and not self.pool.curator.holds_reward_of(reward.trajectory_uid):
                kept = self._keep_late(reward)
        await self._transactions.notify()
        return kept

    async def pacing(self, channel: str = TRAIN) -> Pacing:
        async with self._transactions.transaction():
            return self.pool.pacing(channel)

    def _channel(self, call: KnowsCall) -> str | None:
        if call.is_ended_too:
            return self.pool.ingest.channel_of(call.trajectory_uid, call.prompt_uid)
        self._attach(call.trajectory_uid, call.gateway)
        return self.pool.ingest.knows(call.trajectory_uid, call.prompt_uid)

    def _answer(self, call: ProducerCall, shortage: str | None) -> ProducerAnswer | Exception:
        try:
            if self._is_elsewhere(call):
                return GroupElsewhere(call.prompt_uid)
            match call:
                case KnowsCall():
                    return self._channel(call)
                case Registration() | SessionCall(opens=True) if shortage is not None:
                    return PoolUnavailable(shortage)
                case Registration() | SessionCall() | MoveCall():
                    return self._open(call)
                case CompleteCall() if self._holders(call.trajectory_uid, call.gateway):
                    return FlushNeeded()
                case CompleteCall(trajectory_uid, prompt_uid, reward, failure):
                    return self.pool.ingest.complete(trajectory_uid, prompt_uid, reward, failure)
                case AbortCall(trajectory_uid, prompt_uid):
                    return self.pool.ingest.abort(trajectory_uid, prompt_uid)
                case _:
                    assert_never(call)
        except StepwellError as refusal:
            return refusal
        except Exception as failure:
            log.exception("shard %s failed to answer %s", self._transactions.name, call)
            return failure

    def _open(self, call: Registration | SessionCall | MoveCall) -> SessionPlace | Registration | None:
        if isinstance(call, MoveCall):
            return self.pool.ingest.move(call.trajectory_uid, call.prompt_uid, call.to_prompt_uid)
        if isinstance(call, Registration):
            self.pool.ingest.register(call)
            self._attach(call.trajectory_uid, call.gateway)
            return None
        place = self.pool.sessions.place(call)
        if place is not None and call.opens:
            self._attach(place.trajectory_uid, call.gateway)
        return place

    def _is_elsewhere(self, call: ProducerCall) -> bool:
        if isinstance(call, Registration):
            return self.pool.ingest.is_elsewhere(call)
        if isinstance(call, SessionCall):
            return self.pool.sessions.is_elsewhere(call)
        return self.pool.ownership.is_elsewhere(call.trajectory_uid, call.prompt_uid)

    def _check_is_here(self, trajectory_uid: str, prompt_uid: str, revision: int | None) -> None:
        self._transactions.check_routed(revision)
        if self.pool.ownership.is_elsewhere(trajectory_uid, prompt_uid):
            raise GroupElsewhere(prompt_uid)

    def _attach(self, trajectory_uid: str, gateway: str) -> None:
        """The gateway serves the trajectory."""
        trajectory = self.pool.state.trajectories.get(trajectory_uid)
        if trajectory is not None:
            self.pool.state.touch_session(trajectory)
        if gateway:
            self._note_gateway(gateway)
            if trajectory is not None and trajectory.gateways is not None:
                self.pool.state.set_gateways(trajectory, trajectory.gateways | {gateway})

    def _note_gateway(self, gateway: str) -> None:
        """It lives. After a restart of the shard it is asked too."""
        self._gateways.note(gateway)
        self.pool.state.set_living_gateways(self._gateways.living())

    def _holders(self, trajectory_uid: str, but: str) -> set[str]:
        """The other gateways that may hold steps of a trajectory. Without the name of one, they are not known."""
        trajectory = self.pool.state.trajectories.get(trajectory_uid)
        if not but or trajectory is None or trajectory.completed or not trajectory.is_at_home:
            return set()
        self._gateways.note(but)
        return self._gateways.holders(trajectory, but=but)

    async def _await_flushes(self, trajectory_uid: str, gateway: str, timeout: float) -> None:
        """Until no other living gateway holds steps of the trajectory."""
        deadline = time.monotonic() + timeout
        while holders := self._holders(trajectory_uid, gateway):
            if time.monotonic() > deadline:
                raise PoolUnavailable(
                    f"{len(holders)} gateways have not sent their steps of trajectory {trajectory_uid} within "
                    f"{timeout:g} s; try again"
                )
            for holder in holders:
                self._gateways.ask(holder, trajectory_uid)
            await self._gateways.wait(self._transactions.recheck_interval)
            self._transactions.check_open()

    def _watch_sessions(self) -> None:
        if self.pool.state.sessions.called:
            self._session_watch.start()

    async def _end_idle(self) -> bool:
        """Complete the idle sessions of which no gateway holds a step. True if sessions are left."""
        async with self._transactions.transaction():
            idle = self.pool.sessions.idle()
            ended = sum([self._end_unless_held(trajectory) for trajectory in idle])
            self._attach_called_again({trajectory.uid for trajectory in idle})
        if ended:
            await self._transactions.notify()
        return bool(self.pool.state.sessions.called)

    def _end_unless_held(self, trajectory: Trajectory) -> bool:
        """A gateway with a call in flight says so when it is asked: then the session is not idle any more."""
        holders = self._gateways.holders(trajectory, but="")
        for holder in holders:
            self._gateways.ask(holder, trajectory.uid)
        if not holders:
            self.pool.sessions.end_idle(trajectory)
        return not holders

    def _attach_called_again(self, idle: set[str]) -> None:
        """A session that was idle and has been called since may be served by any gateway."""
        for trajectory in filter(None, map(self.pool.state.trajectories.get, self._asked_idle - idle)):
            self.pool.state.set_gateways(trajectory, self._gateways.living())
        self._asked_idle = idle

    def _keep_late(self, reward: RewardGiven) -> bool:
        """Write the reward to the archive; False if there is none."""
        archive = self._transactions.archive
        if archive is None:
            return False
        revision = self.pool.state.count_late_reward(reward.trajectory_uid)
        archive.add_late_reward(LateReward(**asdict(reward), revision=revision, at=self._transactions.clock()))
        return True
