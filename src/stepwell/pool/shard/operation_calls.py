"""A shard runs operations, and asks gateways for what they hold."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.plan import GroupElsewhere
from stepwell.pool.api.producing import TRAIN, FlushNeeded, Pacing
from stepwell.pool.api.transport import flush_topic
from stepwell.pool.shard.operation import LongOperation, Operation, ShardRoute
from stepwell.pool.shard.shard import Shard, ShardCalls
from stepwell.pool.state.records import Trajectory

log = logging.getLogger("stepwell.pool")

P = TypeVar("P")

TICKS = 4
"""How often a session is looked at within its idle time, at least."""
OF_0_2 = (
    "this pool is of release 0.3, and the process that asks is of 0.2: bring it to the release of the pool; its steps "
    "wait meanwhile"
)


class OperationCalls(ShardCalls):
    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        transactions = shard.transactions
        self._session_watch = SessionWatch(
            self.pool.state.limits.session_idle, transactions.recheck_interval, self._end_idle
        )
        self._asked_idle: set[str] = set()
        """Idle trajectories of sessions whose gateways are asked for what they hold."""
        transactions.before_commit.append(self._watch_sessions)

    async def run(self, operations: Sequence[Operation[Any]], revision: int | None = None) -> list[Any]:
        """One answer for each operation, or the exception by which it is refused. What they change is in the journal.

        Here and below, `revision` is that of the plan by which the caller has chosen this shard for a group.
        """
        self._transactions.check_open()
        if any(operation.route is ShardRoute.GROUP for operation in operations):
            self._transactions.check_routed(revision)
        if not any(operation.changes for operation in operations):
            return [self._run(operation) for operation in operations]
        async with self._transactions.transaction():
            return [self._run(operation) for operation in operations]

    async def answer(self, *_: object, **__: object) -> NoReturn:
        """Processes of 0.2 call it, under four names. They keep their steps, and say why."""
        raise PoolUnavailable(OF_0_2)

    submit_steps = submit_groups = give_reward = answer

    async def run_flushed(self, operation: Operation[Any], timeout: float, revision: int | None = None) -> Any:
        """Run an operation as soon as no other living gateway holds steps that it needs."""
        self._transactions.check_routed(revision)
        deadline = time.monotonic() + timeout
        while True:
            (answer,) = await self.run([operation], self._transactions.plan.revision)
            if not isinstance(answer, FlushNeeded):
                break
            try:
                await self._await_flushes(answer.trajectory_uid, answer.gateway, timeout, deadline)
            except PoolUnavailable:
                if operation.is_patient:
                    raise
                operation = replace(operation, gateway="")  # type: ignore[type-var]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run_long(self, operation: LongOperation[P]) -> P:
        """Run an operation to its end, which may be far away. It goes on if nobody waits for it."""
        self._transactions.check_open()
        return await operation.run(self.shard)

    async def flushed(self, gateway: str, trajectory_uids: Sequence[str]) -> None:
        """The gateway holds no step of these trajectories."""
        self._transactions.check_open()
        for trajectory in filter(None, map(self.pool.state.trajectories.get, trajectory_uids)):
            self.pool.state.set_gateways(trajectory, {*trajectory.gateways} - {gateway})
        for follow in self.shard.on_flushed:
            follow(gateway, trajectory_uids)
        self.shard.gateways.notify()

    async def leave(self, gateway: str) -> None:
        """The gateway ends, and holds nothing."""
        async with self._transactions.transaction():
            self.shard.gateways.leave(gateway)
            self.shard.news.remove(flush_topic(gateway))
            self.pool.state.lose_gateway(gateway, is_dead=False)
            self.pool.state.set_living_gateways(self.shard.gateways.living())

    async def pacing(self, channel: str = TRAIN) -> Pacing:
        async with self._transactions.transaction():
            return self.pool.pacing(channel)

    def _run(self, operation: Operation[Any]) -> Any:
        try:
            return (
                GroupElsewhere(operation.routed_by) if operation.is_elsewhere(self.shard) else operation.run(self.shard)
            )
        except (StepwellError, FlushNeeded) as refusal:
            return refusal
        except Exception as failure:
            log.exception("shard %s failed to run %s", self._transactions.name, operation)
            return failure

    async def _await_flushes(self, trajectory_uid: str, gateway: str, timeout: float, deadline: float) -> None:
        """Until no other living gateway holds steps of the trajectory."""
        while holders := self.shard.holders(trajectory_uid, gateway):
            if time.monotonic() > deadline:
                raise PoolUnavailable(
                    f"{len(holders)} gateways have not sent their steps of trajectory {trajectory_uid} within "
                    f"{timeout:g} s; try again"
                )
            self.shard.gateways.ask_for(self.pool.state.trajectories[trajectory_uid], holders)
            await self.shard.gateways.wait(self._transactions.recheck_interval)
            self._transactions.check_open()

    def _watch_sessions(self) -> None:
        if self.pool.state.sessions.called:
            self._session_watch.start()

    async def _end_idle(self) -> bool:
        """Complete the idle sessions of which no gateway holds a step. True if sessions are left."""
        async with self._transactions.transaction():
            idle = self.pool.sessions.idle()
            for trajectory in idle:
                self._end_unless_held(trajectory)
            self._attach_called_again({trajectory.uid for trajectory in idle})
        return bool(self.pool.state.sessions.called)

    def _end_unless_held(self, trajectory: Trajectory) -> None:
        """A gateway with a call in flight says so when it is asked: then the session is not idle any more."""
        holders = self.shard.gateways.holders(trajectory, but="")
        self.shard.gateways.ask_for(trajectory, holders)
        if not holders:
            self.pool.sessions.end_idle(trajectory)

    def _attach_called_again(self, idle: set[str]) -> None:
        """A session that was idle and has been called since may be served by any gateway."""
        for trajectory in filter(None, map(self.pool.state.trajectories.get, self._asked_idle - idle)):
            self.pool.state.set_gateways(trajectory, self.shard.gateways.living())
        self._asked_idle = idle


class SessionWatch:
    """Looks for idle sessions, as long as there are open sessions."""

    def __init__(self, idle: float | None, interval: float, end: Callable[[], Awaitable[bool]]) -> None:
        """`end` is called every `interval` seconds, or more often; it says if sessions are left. Without `idle`, no
        session ends so."""
        self._tick = None if idle is None else min(interval, idle / TICKS)
        self._end = end
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Doing it again is harmless."""
        if self._tick is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(self._tick))

    async def _watch(self, tick: float) -> None:
        are_left = True
        while are_left:
            await asyncio.sleep(tick)
            try:
                are_left = await self._end()
            except PoolUnavailable:  # the shard answers nothing any more
                return
