"""A small policy gradient trainer. It trains on what is ready while agents continue.

- A batch is acknowledged only when a checkpoint that contains it is on disk (without checkpoints: when it is in the
  weights), so a trainer that dies loses nothing.
- A batch that comes back although a checkpoint contains it is recognised by name and not trained again.
- A resumed run continues bit for bit.
- Groups that teach nothing are acknowledged with the batch that is trained in their place.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stepwell.pool.client import DataPool
from stepwell.trainers.feed import Feed
from stepwell.trainers.learner import Learner, OldPolicies
from stepwell.trainers.reporting import Report, Stopwatch, UpdateMetrics, guarded, measure
from stepwell.trainers.settings import Settings, choose_old_logprobs
from stepwell.trainers.transfers import TensorState

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
        self._feed = Feed(pool, self.settings)
        self._sync = sync
        self._checkpoints = checkpoints
        self._reports = [guarded(report) for report in reports]
        self._learner = Learner(model, reference, self.settings)
        self._old_policies = OldPolicies(model, self.settings)
        self._is_started = False
        self._engines_are_behind = False

    def run(self, updates: int | None = None) -> None:
        """Train until that many updates are done, including those before a resume."""
        self.start()
        while self.update < (self.settings.updates if updates is None else updates):
            self.step()
        if self._feed.has_open_leases:
            self._save()

    def start(self) -> None:
        """Continue from the checkpoint, if there is one, and bring its weights to the engines. `step` calls it."""
        if self._is_started:
            return
        if self._checkpoints and (saved := read_checkpoint(self._checkpoints)):
            self._restore(saved)
            self._feed.acknowledge()
        if self._sync is not None:
            self.version = self._feed.unseen_version(self.version)
            self._sync_weights()
        self._is_started = True

    def step(self) -> UpdateMetrics:
        """Fetch a batch, train on it, save, and sync."""
        self.start()
        stopwatch, before = Stopwatch(), self.version
        with stopwatch.timing("fetch"):
            settings = self.settings
            chosen = self._feed.take_new(settings.groups, self._save, refills=settings.max_refills)
        with stopwatch.timing("train"), self._feed.returned_on_failure():
            rows = self._old_policies.fill(chosen.rows)
            if rows.tokens:
                self._old_policies.before_update()
            learned = self._learner.learn(rows, self.update)
        self._record_update(is_changed=rows.tokens > 0)
        with stopwatch.timing("save"):
            if self.update % self.settings.checkpoint_every == 0:
                self._save()
        with stopwatch.timing("sync"):
            gap = self._sync_weights() if self.version != before else None
        metrics = measure(
            chosen.batch,
            rows,
            learned,
            stopwatch,
            update=self.update,
            before=before,
            version=self.version,
            gap=gap,
            refills=chosen.refills,
        )
        for report in self._reports:
            report(metrics)
        self._feed.monitor.check(rows, before)
        return metrics

    def _record_update(self, *, is_changed: bool) -> None:
        """The batch is in the weights; if it has changed them, they get a new version when a sync is due."""
        self.update += 1
        self._feed.count_as_trained()
        self._engines_are_behind |= is_changed
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
        """Goes on from these weights with a new optimizer. The data that was trained stays acknowledged: the weights
        are to blame, or it is."""
        log.warning("update %d: the trainer starts again from the weights of the stable version", self.update)
        self.model.load_state_dict(weights)
        self._learner.reset_optimizer()
        self._save()

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
                **asdict(self._feed.state()),
            )
            write_checkpoint(self._checkpoints, checkpoint)
        self._feed.acknowledge()

    def _restore(self, saved: Checkpoint) -> None:
        self.model.load_state_dict(saved.model)
        self._learner.optimizer.load_state_dict(saved.optimizer)
        set_random_state(saved.random)
        self.update, self.version = saved.update, saved.version
        self._feed.restore(saved)
