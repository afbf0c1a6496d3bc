"""What a shard ends by itself when it hears nothing more: the leases of silent holders, and idle sessions."""

import asyncio
import logging

from stepwell.pool.api.leasing import Settlement, decision_of
from stepwell.pool.shard.shard import Shard, Watch
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.slice import Slice

log = logging.getLogger("stepwell.pool")

LEASE_TICKS = 10
"""How often silent holders are looked for within the time after which they are taken for dead."""
SESSION_TICKS = 4
"""How often a session is looked at within its idle time, at least."""
DECISION_TIMEOUT = 2.0
"""Seconds that the coordinator of a batch may take to answer."""


class SilentHolders(Slice):
    """Looks for silent holders of leases, as long as there are leases. What is not acknowledged returns."""

    name = "silent holders"
    _shard: Shard
    _watch: Watch

    def attach(self, shard: Shard) -> None:
        self._shard = shard
        self._watch = Watch(shard.heartbeat_timeout / LEASE_TICKS, self._end_silent)
        shard.before_commit.append(self._start)

    def _start(self) -> None:
        if self._has_leases():
            self._watch.start()

    def _has_leases(self) -> bool:
        return bool(self._shard.pool.state.leases or self._shard.pool.state.reward_leases)

    async def _end_silent(self, passed: float) -> bool:
        leasing, lease_uids = self._shard.pool.leasing, self._shard.heartbeats.pass_time(passed)
        doubtful = leasing.take_doubtful(lease_uids)
        decisions = {uid: await self._decision(uid) for uid in doubtful}
        trained = [uid for uid, how in decisions.items() if how is Settlement.DONE]
        undecided = [uid for uid, how in decisions.items() if how is None]
        silent = [uid for uid in {*lease_uids, *doubtful} if uid not in trained and uid not in undecided]
        if trained or silent:
            log.warning(
                "shard %s: the holders of %d leases are silent: %d return, %d are acknowledged",
                *(self._shard.name, len(trained) + len(silent), len(silent), len(trained)),
            )
            async with self._shard.transaction():
                for uid in trained:
                    leasing.ack(uid)
                leasing.end_silent(silent)
                self._shard.pool.rewards_due.end_silent(silent)
        return self._has_leases()

    async def _decision(self, lease_uid: str) -> Settlement | None:
        """What the coordinator of its batch says; None if it cannot be asked now. If it has not decided yet, the batch
        is not acknowledged any more."""
        coordinator, uid = decision_of(lease_uid) or ("", "")
        if coordinator == self._shard.name:
            async with self._shard.transaction():
                return self._shard.pool.leasing.nack(uid)
        if self._shard.ask_decision is None:
            return Settlement.EXPIRED
        try:
            async with asyncio.timeout(DECISION_TIMEOUT):
                return await self._shard.ask_decision(coordinator, uid)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the lease waits for the decision
            log.warning("lease %s waits for the decision of shard %s: %r", lease_uid, coordinator, failure)
            return None


class IdleSessions(Slice):
    """Completes the idle sessions of which no gateway holds a step. They are looked for while there are sessions."""

    name = "idle sessions"
    _shard: Shard

    def __init__(self, journal: StateJournal) -> None:
        super().__init__(journal)
        self.watch: Watch | None = None
        """None if no session ends so."""
        self._asked: set[str] = set()
        """Idle trajectories of sessions whose gateways are asked for what they hold."""

    def attach(self, shard: Shard) -> None:
        self._shard = shard
        idle = shard.pool.state.limits.session_idle
        if idle is not None:
            self.watch = Watch(min(shard.recheck_interval, idle / SESSION_TICKS), self._end_idle)
            shard.before_commit.append(self._start)

    def _start(self) -> None:
        if self.watch is not None and self._shard.pool.state.sessions.called:
            self.watch.start()

    async def _end_idle(self, passed: float) -> bool:
        pool = self._shard.pool
        async with self._shard.transaction():
            idle = pool.sessions.idle()
            for trajectory in idle:
                self._end_unless_held(trajectory)
            self._attach_called_again({trajectory.uid for trajectory in idle})
        return bool(pool.state.sessions.called)

    def _end_unless_held(self, trajectory: Trajectory) -> None:
        """A gateway with a call in flight says so when it is asked: then the session is not idle any more."""
        holders = self._shard.gateways.holders(trajectory, but="")
        self._shard.gateways.ask_for(trajectory, holders)
        if not holders:
            self._shard.pool.sessions.end_idle(trajectory)

    def _attach_called_again(self, idle: set[str]) -> None:
        """A session that was idle and has been called since may be served by any gateway."""
        state = self._shard.pool.state
        for trajectory in filter(None, map(state.trajectories.get, self._asked - idle)):
            state.set_gateways(trajectory, self._shard.gateways.living())
        self._asked = idle
