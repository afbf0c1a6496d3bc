"""A small policy gradient trainer. It trains on what is ready while agents continue.

- A batch is acknowledged only when a checkpoint that contains it is on disk (without checkpoints: when it is in the
  weights), so a trainer that dies loses nothing.
- A batch that comes back although a checkpoint contains it is recognised by name and not trained again.
- A resumed run continues bit for bit.
- Groups that teach nothing are acknowledged with the batch that is trained in their place.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from stepwell.errors import FetchTimeout, StepwellError
from stepwell.pool.client import DataPool
from stepwell.steps.running_statistics import NO_PAST, statistics_of
from stepwell.trainers.checkpoint import (
    Checkpoint,
    TensorState,
    TrainedLedger,
    random_state,
    read_checkpoint,
    set_random_state,
    write_checkpoint,
)
from stepwell.trainers.joined_batch import JoinedBatch
from stepwell.trainers.learnable import LearningMonitor
from stepwell.trainers.learner import Learner
from stepwell.trainers.old_logprobs import OldPolicies
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.reporting import Report, Stopwatch, UpdateMetrics, guarded, measure
from stepwell.trainers.rows import TrainedRows, choose_rows
from stepwell.trainers.settings import Settings, choose_old_logprobs

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")


class Synced(Protocol):
    @property
    def version(self) -> int:
        """The newest version that has a number; the next one gets a larger number."""

    @property
    def logprob_gap(self) -> float | None: ...

    @property
    def restore(self) -> TensorState | None:
        """Weights from which the trainer must start again, because a guard did not let its own ones through."""


class Sync(Protocol):
    """Brings weights to the engines: `stepwell.trainers.weight_sync.WeightSync`, or, if new weights must be proved
    better first, `stepwell.trainers.guard.guarded_sync.GuardedSync`."""

    def sync(self, weights: "torch.nn.Module", version: int) -> Synced: ...


class FetchedBatch(NamedTuple):
    batch: TrainingBatch
    rows: TrainedRows
    refills: int = 0
    """How often more groups were fetched in place of those that teach nothing."""


class AsyncTrainer:
    """Trains `model`: any module that takes input_ids and attention_mask and returns an object with `.logits`.

    `checkpoints` is a folder; a run that finds a checkpoint there continues from it. Each of `reports` is called with
    the metrics of every update.
    """

    def __init__(
        self,
        pool: DataPool,
        model: "torch.nn.Module",
        *,
        settings: Settings | None = None,
        sync: Sync | None = None,
        checkpoints: Path | None = None,
        reference: "torch.nn.Module | None" = None,
        reports: Sequence[Report] = (),
    ) -> None:
        self.settings = choose_old_logprobs(settings or Settings(), ("recomputed", "current", "recorded"), "")
        self.model = model
        self.update = 0
        """Trained batches, including those before a resume."""
        self.version = 0
        """The last version sent to the engines."""
        self._pool = pool
        self._sync = sync
        self._checkpoints = checkpoints
        self._reports = [guarded(report) for report in reports]
        self._learner = Learner(model, reference, self.settings)
        self._old_policies = OldPolicies(model, self.settings)
        self._monitor = LearningMonitor(self.settings.max_unlearnable)
        self._ledger = TrainedLedger()
        self._statistics = NO_PAST
        self._is_started = False
        self._engines_are_behind = False

    def run(self, updates: int | None = None) -> None:
        """Train until that many updates are done, including those before a resume."""
        self.start()
        while self.update < (self.settings.updates if updates is None else updates):
            self.step()
        if self._ledger.leases:
            self._save()

    def start(self) -> None:
        """Continue from the checkpoint, if there is one, and bring its weights to the engines. `step` calls it."""
        if self._is_started:
            return
        if self._checkpoints and (saved := read_checkpoint(self._checkpoints)):
            self._restore(saved)
            self._ledger.acknowledge(self._pool)
        if self._sync is not None:
            newest = self._pool.stats().policy_version
            self.version = self.version if newest <= self.version else newest + 1
            self._sync_weights()
        self._is_started = True

    def step(self) -> UpdateMetrics:
        """Fetch a batch, train on it, save, and sync."""
        self.start()
        stopwatch, before = Stopwatch(), self.version
        with stopwatch.timing("fetch"):
            batch, rows, refills = self._fetch()
        with stopwatch.timing("train"), self._nack_on_failure(batch):
            rows = self._old_policies.fill(rows)
            if rows.tokens:
                self._old_policies.before_update()
            learned = self._learner.learn(rows, self.update)
        self._record_update(batch, rows)
        with stopwatch.timing("save"):
            if self.update % self.settings.checkpoint_every == 0:
                self._save()
        with stopwatch.timing("sync"):
            gap = self._sync_weights() if self.version != before else None
        metrics = measure(
            batch,
            rows,
            learned,
            stopwatch,
            update=self.update,
            before=before,
            version=self.version,
            gap=gap,
            refills=refills,
        )
        for report in self._reports:
            report(metrics)
        self._monitor.check(rows, before)
        return metrics

    def _record_update(self, batch: TrainingBatch, rows: TrainedRows) -> None:
        """The batch is in the weights; they get a new version if a sync is due."""
        self.update += 1
        self._ledger.add(batch.leases, rows.uids)
        self._statistics = rows.statistics
        self._engines_are_behind |= rows.tokens > 0
        if self._sync is not None and self._engines_are_behind and self.update % self.settings.sync_every == 0:
            self.version += 1

    def _sync_weights(self) -> float | None:
        assert self._sync is not None
        synced = self._sync.sync(self.model, self.version)
        self._engines_are_behind = False
        is_served = synced.restore is None and synced.version == self.version
        self._old_policies.set_current(self.version if is_served else None)
        self.version = max(self.version, synced.version)
        if synced.restore is not None:
            self._start_again_from(synced.restore)
        return synced.logprob_gap

    def _start_again_from(self, weights: TensorState) -> None:
        """With a new optimizer. The data that was trained stays acknowledged: the weights are to blame, or it is."""
        log.warning("update %d: the trainer starts again from the weights of the stable version", self.update)
        self.model.load_state_dict(weights)
        self._learner.reset_optimizer()
        self._save()

    # -- batches -----------------------------------------------------------------------------------------------------

    def _fetch(self) -> FetchedBatch:
        """A batch with something new: rollouts may come back that were trained under a lease that expired."""
        while True:
            fetched = self._refill(self._choose(self._take(self.settings.groups)))
            if fetched.rows.is_new_T.any():
                return fetched
            self._ledger.add(fetched.batch.leases, ())
            self._save()

    def _refill(self, fetched: FetchedBatch) -> FetchedBatch:
        """With more groups in place of those that teach nothing. If there are no more in time, with what there is."""
        while fetched.refills < self.settings.max_refills:
            missing = self.settings.groups - fetched.rows.groups_trained
            if missing <= 0:
                break
            with self._nack_on_failure(fetched.batch):
                try:
                    more = self._take(missing)
                except FetchTimeout as timeout:
                    log.warning("%d groups teach nothing and are not replaced: %s", missing, timeout)
                    break
            fetched = self._choose(JoinedBatch([fetched.batch, more]), fetched.refills + 1)
        return fetched

    def _choose(self, batch: TrainingBatch, refills: int = 0) -> FetchedBatch:
        with self._nack_on_failure(batch):
            return FetchedBatch(batch, choose_rows(batch, self._ledger, self.settings, self._statistics), refills)

    def _take(self, groups: int) -> TrainingBatch:
        settings = self.settings
        return self._pool.fetch_batch(
            groups,
            timeout=settings.fetch_timeout,
            lease=settings.lease,
            channel=settings.channel,
            unit=settings.unit,
        )

    @contextmanager
    def _nack_on_failure(self, batch: TrainingBatch) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with suppress(StepwellError):
                self._pool.nack(batch)
            raise

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """First writes the checkpoint, then acknowledges what is in it."""
        if self._checkpoints is not None:
            checkpoint = Checkpoint(
                model=self.model.state_dict(),
                optimizer=self._learner.optimizer.state_dict(),
                random=random_state(),
                update=self.update,
                version=self.version,
                leases=list(self._ledger.leases),
                trajectories=self._ledger.trained,
                statistics=self._statistics.as_numbers(),
            )
            write_checkpoint(self._checkpoints, checkpoint)
        self._ledger.acknowledge(self._pool)

    def _restore(self, saved: Checkpoint) -> None:
        self.model.load_state_dict(saved.model)
        self._learner.optimizer.load_state_dict(saved.optimizer)
        set_random_state(saved.random)
        self.update, self.version = saved.update, saved.version
        self._ledger = TrainedLedger(saved.leases, saved.trajectories)
        self._statistics = statistics_of(saved.statistics)
