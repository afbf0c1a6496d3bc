"""The weights of each version on their way to the engines that shall have them; it begins canaries and promotes."""

import logging
import time
from typing import Any

from stepwell.errors import Conflict, SyncFailed
from stepwell.pool.client import DataPool
from stepwell.trainers.guard.canary import StagedVersions
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.policy_record import PolicyRecord
from stepwell.trainers.guard.statistics import ComparisonState

log = logging.getLogger("stepwell.trainers")


class WeightMoves:
    def __init__(self, record: PolicyRecord, staged: StagedVersions, pool: DataPool, settings: GuardSettings) -> None:
        self._record = record
        self._staged = staged
        self._pool = pool
        self._settings = settings
        self._served_at = time.monotonic()
        """When an engine of the canary last told its version."""

    def move(self) -> None:
        """Makes the moves that are due now. SyncFailed if an engine does not take its weights; the next call tries
        again."""
        self._begin()
        state = self._record.state
        if state.candidate is not None and state.phase == "placing":
            self._place(state.candidate)
        elif state.candidate is not None and state.phase == "testing":
            self._check_canary(state.candidate)
        elif state.candidate is not None and state.phase == "promoting":
            self._promote(state.candidate)
        state = self._record.state
        if state.stable is not None and state.phase != "promoting":
            self._staged.catch_up(state.stable)

    def _begin(self) -> None:
        """Makes the newest version the candidate, if there is none."""
        state, count = self._record.state, self._settings.canary_engines
        if state.phase != "idle" or state.newest is None or state.restores or state.stable is None:
            return
        told = self._staged.told_versions(state.stable) if count else {}
        answering = [engine for engine, version in told.items() if version is not None]
        with self._record.lock:
            state = self._record.state
            if state.newest is None or state.restores:
                return
            changes: dict[str, Any] = {
                "candidate": state.newest,
                "newest": None,
                "test": ComparisonState(),
                "alarmed_at": 0.0,
            }
            if not count:
                self._record.set(phase="promoting", reason=self._record.text_of(state.newest, "no canary"), **changes)
            elif len(answering) > count:
                self._record.set(phase="placing", engines=tuple(answering[-count:]), **changes)
            else:
                text = f"version {state.newest} waits: a canary with {count} engines needs {count + 1} that answer"
                raise SyncFailed(f"{text}, and there are {len(answering)}")

    def _place(self, candidate: int) -> None:
        failure = self._catch_up(candidate)
        is_served = self._is_served(candidate)
        with self._record.lock:
            if is_served:
                share = f"{self._settings.canary_share:.0%} of sessions"
                self._record.begin_canary(candidate, self._record.text_of(candidate, share))
                self._served_at = time.monotonic()
                return
            newest = self._record.newest_or(candidate)
            self._record.set(phase="idle", candidate=None, newest=newest, engines=())
        raise failure or SyncFailed(f"no engine of the canary of version {candidate} answers")

    def _check_canary(self, candidate: int) -> None:
        """Gives a canary's engine that was restarted its weights; ends the canary if none of its engines answers."""
        self._catch_up(candidate)
        if self._is_served(candidate):
            self._served_at = time.monotonic()
            return
        silent = time.monotonic() - self._served_at
        with self._record.lock:
            if silent >= self._settings.engine_timeout and self._record.state.phase == "testing":
                text = f"its engines do not answer for {silent:.0f} s; it can be tried again"
                self._record.roll_back(text, is_bad=False)

    def _promote(self, candidate: int) -> None:
        self._catch_up(candidate)
        if not self._is_served(candidate):
            raise SyncFailed(f"no engine has version {candidate}, which is to be promoted")
        with self._record.lock:
            state = self._record.state
            if self._pool.canary() is not None or self._pool.policy_version != candidate:
                try:
                    self._record.decide(candidate, "promote", state.reason, policy_version=candidate)
                except Conflict as withdrawn:
                    self._record.roll_back(str(withdrawn), is_told=True)
                    return
            self._record.set(phase="idle", stable=candidate, candidate=None, engines=(), cursor=None)

    def _is_served(self, version: int) -> bool:
        return str(version) in self._staged.told_versions(version).values()

    def _catch_up(self, version: int) -> SyncFailed | None:
        """An engine that fails does not hold up the others."""
        try:
            self._staged.catch_up(version)
        except SyncFailed as failure:
            log.warning("an engine did not get version %d: %s", version, failure)
            return failure
        return None
