"""New weights on their way to all sessions: validation, a canary, and promotion or rollback by a sequential test.

Invariants:
- Only promoted versions serve all sessions. There is one canary at a time, and at least one engine without it.
- A rollback is told to the pool first, so sessions leave the canary at once; then its engines get the stable weights.
- While a canary is tested, the trainer goes on. Only its newest weights wait; the versions between are skipped.
- What the pool has rolled back is not staged again, also if the folder was lost: then the pool says with which version
  the guard may begin.
- The state is on disk after each change. A trainer that is killed continues the test where it was.
- A decision of an operator is obeyed.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.errors import BadRequest
from stepwell.pool.api.policy import PolicyAction
from stepwell.pool.client import DataPool
from stepwell.trainers.guard.canary import CanaryWatch, MakeSync, StagedVersions, WeightMoves
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.policy_record import Phase, PolicyRecord, VersionStore
from stepwell.trainers.guard.statistics import Scores, SequentialTest, checked, mean_of, refusal
from stepwell.trainers.learner import borrowed
from stepwell.trainers.transfers import TensorState, is_sharded_model
from stepwell.trainers.weight_sync import keep_calling

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

LONGEST_INTERVAL = 5.0
"""Seconds until the next try, after failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """The result of one call of `GuardedSync.sync`."""

    version: int
    """The largest number that a version has had; the trainer's next one gets a larger number."""
    stable: int | None
    candidate: int | None
    logprob_gap: float | None = None
    """The gap of the first version; others are compared in the background."""
    restore: TensorState | None = None
    """Weights from which the trainer must start again, with a new optimizer: a version was rolled back, and the
    trainer's own weights come from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStatus:
    """The present state of the guard, for reports."""

    stable: int | None
    candidate: int | None
    newest: int | None
    """The version that waits until the candidate is decided."""
    phase: Phase
    comparisons: int
    canary_rewards: int
    canary_mean: float | None
    stable_rewards: int
    stable_mean: float | None
    validation: float | None
    """The mean score of the stable version."""
    decisions: dict[PolicyAction, int]
    """How many of each kind this process has made."""
    last_reason: str
    alarm: str | None
    """Why the candidate has no decision yet, if it should have one by now."""


class GuardedSync:
    """Brings weights to the engines through a canary: `AsyncTrainer(sync=GuardedSync(…))`.

    `folder` keeps the state and the weights of the last versions. `make_sync` makes a WeightSync with
    `background=False` for a list of engines. `validate` is called in the trainer's thread with each new version, before
    a session gets it, and returns a score for each of the same tasks; before a refusal, also with the stable version.
    With `background=False` nothing is watched: call `watch` and `move` yourself.
    """

    def __init__(
        self,
        pool: DataPool,
        folder: Path,
        make_sync: MakeSync,
        *,
        settings: GuardSettings | None = None,
        validate: Validate | None = None,
        background: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings or GuardSettings()
        self._pool = pool
        self._validate = validate
        self._background = background
        self._store = VersionStore(folder)
        self._record = PolicyRecord(pool, self._store, self.settings, clock)
        self._staged = StagedVersions(make_sync, folder, self._record.engines_of)
        self._canary_watch = CanaryWatch(self._record, pool, self.settings)
        self._moves = WeightMoves(self._record, self._staged, pool, self.settings)
        self._is_started = False
        self._is_closed = False
        self._syncing = threading.Lock()
        self._moving = threading.Lock()
        self._threads: list[threading.Thread] = []

    def sync(self, weights: "torch.nn.Module", version: int) -> GuardReport:
        """Takes new weights. The first version is brought to all engines now; later ones wait for their canary."""
        with self._syncing:
            if is_sharded_model(weights):
                raise BadRequest("a GuardedSync stores whole models; this one is sharded: use WeightSync")
            self._pool.announce_sync()
            if self._record.state.stable is None:
                gap = self._promote_first(weights, version)
                self._start(weights)
                return self._report(gap=gap)
            self._start(weights)
            if (restore := self._weights_to_restore()) is not None:
                return self._report(restore)
            if version > self._record.state.last:
                self._take(weights, version)
            return self._report(self._weights_to_restore())

    def watch(self) -> None:
        """Reads the rewards of a canary, and decides. A thread calls it at intervals."""
        if not self._is_closed:
            self._canary_watch.watch()

    def move(self) -> None:
        """Brings weights to the engines that shall have them. A thread calls it at intervals."""
        with self._moving:
            if self._is_started and not self._is_closed:
                self._pool.announce_sync()
                self._moves.move()

    def status(self) -> GuardStatus:
        state = self._record.state
        test = SequentialTest(self.settings, state.test)
        scores = None if state.stable is None else self._store.scores(state.stable)
        is_overdue = state.phase == "testing" and state.alarmed_at > 0.0
        return GuardStatus(
            stable=state.stable,
            candidate=state.candidate,
            newest=state.newest,
            phase=state.phase,
            comparisons=state.test.comparisons,
            canary_rewards=state.test.canary_rewards,
            canary_mean=test.canary_mean,
            stable_rewards=state.test.stable_rewards,
            stable_mean=test.stable_mean,
            validation=None if scores is None else mean_of(scores),
            decisions=dict(self._record.decisions),
            last_reason=self._record.last_reason,
            alarm=test.outlook(self._record.clock() - state.began_at) if is_overdue else None,
        )

    def close(self) -> None:
        """Nothing is watched or moved any more. A canary stays as it is, and the next process continues it."""
        self._is_closed = True
        with self._moving, self._record.lock:
            pass  # what had begun has ended

    def _promote_first(self, model: "torch.nn.Module", version: int) -> float | None:
        self._record.check_beginning(version)
        listed, count = self._pool.engines(), self.settings.canary_engines
        if count and len(listed) <= count:
            raise BadRequest(
                f"a canary with {count} engines needs {count + 1} or more, and the pool lists {len(listed)}: add "
                "engines to the gateway, or let validation alone decide with GuardSettings(canary_engines=0)"
            )
        self._store.save_scores(self._validated(model, version), version)
        self._store.save(model, version)
        with self._moving:
            synced = self._staged.sync(model, version, needed=())
        with self._record.lock:
            self._record.decide(version, "promote", "first version", policy_version=version)
            self._record.set(stable=version, last=version)
        return synced.logprob_gap

    def _start(self, model: "torch.nn.Module") -> None:
        """Starts once in each process: stages what an earlier process has left, and begins to watch."""
        if self._is_started:
            return
        self._record.check_folder()
        state = self._record.state
        versions = {version for version in (state.stable, state.candidate, state.newest) if version is not None}
        for version in sorted(versions):
            if version not in self._staged:
                with borrowed(model, self._store.load(version)):
                    self._staged.stage(model, version, needed=versions)
        if state.candidate is not None:
            log.info("the guard goes on with version %d (%s)", state.candidate, state.phase)
        self._is_started = True
        if self._background:
            tasks = ((self.watch, "the guard cannot watch its canary"), (self.move, "the guard cannot move weights"))
            self._threads = [
                keep_calling(method, self.settings.interval, longest=LONGEST_INTERVAL, task=task)
                for method, task in tasks
            ]

    def _take(self, model: "torch.nn.Module", version: int) -> None:
        if self._record.is_withdrawn(version):  # the folder is older than the pool's decision
            self._record.set(last=version, restores=True)
        elif self._passes_validation(model, version):
            self._stage(model, version)

    def _passes_validation(self, model: "torch.nn.Module", version: int) -> bool:
        """Whether the version is not worse than the stable one."""
        stable, scores = self._record.state.stable, self._validated(model, version)
        assert stable is not None
        if scores is None:
            return True
        found = refusal(
            scores, stable, self._store.scores(stable), lambda: self._validated_again(model, stable), self.settings
        )
        with self._record.lock:
            state = self._record.state
            if found is None:
                self._store.save_scores(scores, version)
                self._record.set(refusals=0)
                return True
            worse = f"{-found.mean:.3f} ± {found.error:.3f} below that of version {stable}"
            self._record.decide(version, "refuse", f"validation is {worse} on the same {found.tasks} tasks")
            refusals = state.refusals + 1
            restores = refusals >= self.settings.max_refusals
            counted = 0 if restores else refusals
            self._record.set(last=version, refusals=counted, restores=state.restores or restores)
            self._record.is_restore_delivered = self._record.is_restore_delivered and not restores
            return False

    def _validated(self, model: "torch.nn.Module", version: int) -> Scores | None:
        return None if self._validate is None else checked(self._validate(model, version))

    def _validated_again(self, model: "torch.nn.Module", stable: int) -> Scores | None:
        with borrowed(model, self._store.load(stable)):
            scores = self._validated(model, stable)
        self._store.save_scores(scores, stable)
        return scores

    def _stage(self, model: "torch.nn.Module", version: int) -> None:
        with self._record.lock:
            self._record.set(newest=None)  # its place is taken
            needed = (self._record.state.stable, self._record.state.candidate)
        self._store.save(model, version)
        self._staged.stage(model, version, needed)
        with self._record.lock:
            has_rollback = self._record.state.restores  # meanwhile
            self._record.set(last=version, newest=None if has_rollback else version)
            state = self._record.state
            kept = [number for number in (state.stable, state.candidate, state.newest) if number is not None]
            self._store.prune(self.settings.keep_versions, kept)

    def _weights_to_restore(self) -> TensorState | None:
        """The weights to restore, once after each rollback. The call after it comes from a trainer that has started
        again."""
        with self._record.lock:
            state = self._record.state
            if not state.restores or state.stable is None:
                return None
            if self._record.is_restore_delivered:
                self._record.set(restores=False)
                return None
            weights = self._store.load(state.stable)
            self._record.is_restore_delivered = True
            return weights

    def _report(self, restore: TensorState | None = None, gap: float | None = None) -> GuardReport:
        state = self._record.state
        return GuardReport(
            version=state.last, stable=state.stable, candidate=state.candidate, restore=restore, logprob_gap=gap
        )
