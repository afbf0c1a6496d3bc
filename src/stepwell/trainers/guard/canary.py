"""A canary from its placement to its end: the weights of each version on their way to the engines that shall have them,
and the watch over the canary's rewards.

- The stable version, the candidate and the newest version have a WeightSync each, which keeps the prepared files. So an
  engine changes from one version to another without the trainer's model, in the time that it takes to load them.
- Which engines belong to a version is asked anew each time.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.errors import Conflict, SyncFailed
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.client import DataPool
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.policy_record import PolicyRecord
from stepwell.trainers.guard.statistics import ComparisonState, SequentialTest
from stepwell.trainers.weight_sync import SyncReport, VersionedPool, WeightSync

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

SLOTS = 3
MakeSync: TypeAlias = Callable[[VersionedPool, Path], WeightSync]
"""Makes a WeightSync for the engines of a list, which may use the folder. It has `background=False`."""


class Slot:
    """The weights of one version, ready to be put into engines; as a pool, the engines of the version."""

    def __init__(self, make_sync: MakeSync, folder: Path, engines_of: Callable[[int], Sequence[str]]) -> None:
        self.version: int | None = None
        self._engines_of = engines_of
        self.sync = make_sync(self, folder)

    def engines(self) -> Sequence[str]:
        return () if self.version is None else self._engines_of(self.version)

    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """The guard tells the pool, with its reason."""

    def announce_sync(self) -> None:
        """The guard announces itself."""


class StagedVersions:
    def __init__(self, make_sync: MakeSync, folder: Path, engines_of: Callable[[int], Sequence[str]]) -> None:
        self._slots = [Slot(make_sync, folder / f"slot-{n}", engines_of) for n in range(SLOTS)]

    def __contains__(self, version: int | None) -> bool:
        return any(slot.version == version for slot in self._slots)

    def stage(self, model: "torch.nn.Module", version: int, needed: Collection[int | None]) -> None:
        """Stages a version in the place of one that is not needed."""
        slot = self._free_slot(needed)
        slot.sync.stage(model, version)
        slot.version = version

    def sync(self, model: "torch.nn.Module", version: int, needed: Collection[int | None]) -> SyncReport:
        """Stages the weights and brings them to the engines, as WeightSync.sync does."""
        slot = self._free_slot(needed)
        slot.version = version
        return slot.sync.sync(model, version)

    def sync_of(self, version: int) -> WeightSync:
        """The sync that has the weights of this version."""
        return next(slot.sync for slot in self._slots if slot.version == version)

    def _free_slot(self, needed: Collection[int | None]) -> Slot:
        free = next(slot for slot in self._slots if slot.version not in needed or slot.version is None)
        free.version = None
        return free


class CanaryTrial:
    """Brings the weights that are due to the engines (`move`), and decides by rewards and operators (`watch`)."""

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
            self._staged.sync_of(state.stable).catch_up()

    def _begin(self) -> None:
        """Makes the newest version the candidate, if there is none."""
        state, count = self._record.state, self._settings.canary_engines
        if state.phase != "idle" or state.newest is None or state.restores or state.stable is None:
            return
        told = self._staged.sync_of(state.stable).versions() if count else {}
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
        return str(version) in self._staged.sync_of(version).versions().values()

    def _catch_up(self, version: int) -> SyncFailed | None:
        """An engine that fails does not hold up the others."""
        try:
            self._staged.sync_of(version).catch_up()
        except SyncFailed as failure:
            log.warning("an engine did not get version %d: %s", version, failure)
            return failure
        return None

    # -- what it earned, and what operators decided --------------------------------------------------------------------

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
