"""A canary's rewards, read from the pool and given to the sequential test; and what operators decided about it."""

import logging
from copy import deepcopy

from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.client import DataPool
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.policy_record import PolicyRecord
from stepwell.trainers.guard.statistics import SequentialTest

log = logging.getLogger("stepwell.trainers")


class CanaryWatch:
    def __init__(self, record: PolicyRecord, pool: DataPool, settings: GuardSettings) -> None:
        self._record = record
        self._pool = pool
        self._settings = settings

    def watch(self) -> None:
        """Reads what came, and decides."""
        with self._record.lock:
            state = self._record.state
            if state.phase != "testing":
                return
            assert state.candidate is not None
            assert state.stable is not None
            if self._obeys_operator(state.candidate):
                return
            test = self._read_rewards(state.candidate, state.stable)
            verdict = test.verdict()
            if verdict is None:
                self._raise_alarm_if_due(state.candidate, test)
            elif verdict.action == "promote":
                self._record.set(phase="promoting", reason=verdict.reason)
            else:
                self._record.roll_back(verdict.reason)

    def _raise_alarm_if_due(self, candidate: int, test: SequentialTest) -> None:
        state = self._record.state
        age = self._record.clock() - state.began_at
        if age >= max(self._settings.alarm_after, 2 * state.alarmed_at):
            self._record.decide(candidate, "overdue", test.outlook(age))
            self._record.set(alarmed_at=age)

    def _read_rewards(self, candidate: int, stable: int) -> SequentialTest:
        """The test and the cursor are written together, so that each reward counts once."""
        state = self._record.state
        came = self._pool.version_rewards(self._settings.channel, state.cursor)
        if came.missed:
            log.warning("%d rewards were dropped before the guard has read them", came.missed)
        test = SequentialTest(self._settings, deepcopy(state.test))
        if came.rewards or came.cursor != state.cursor:
            test.add(came.rewards, canary=candidate, stable=stable)
            self._record.set(cursor=came.cursor, test=test.state)
        return test

    def _obeys_operator(self, candidate: int) -> bool:
        canary = self._pool.canary()
        if canary is not None and canary.version == candidate:
            if canary.share < 1.0:
                return False
            self._record.set(phase="promoting", reason="an operator gave it all sessions")
            return True
        decision = self._ending_of(candidate)
        if decision is None:
            log.warning("the pool has lost the canary of version %d; it is set again", candidate)
            self._record.begin_canary(candidate, "the pool had lost it")
        elif decision.action == "promote":
            self._record.set(phase="promoting", reason=f"decided by {decision.by}: {decision.reason}")
        else:
            self._record.roll_back(f"decided by {decision.by}: {decision.reason}", is_told=True)
        return True

    def _ending_of(self, version: int) -> PolicyDecision | None:
        """The decision that has ended the version's last canary in the pool."""
        for decision in reversed(self._pool.decisions()):
            if decision.version == version:
                return decision if decision.action in ("promote", "rollback") else None
        return None
