"""Groups for a trainer that owns its loop: leased, turned into rows, and settled with the pool.

- What is trained stays leased until `acknowledge`, which the trainer calls when a checkpoint with it is on disk, or,
  without checkpoints, after the step.
- What comes back although it is in the weights is recognised by name, and is not trained again.
- A group that teaches nothing, or that is too old for the trainer, is settled like a trained one, and does not come
  back.
"""

import logging
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np

from stepwell.errors import StepwellError
from stepwell.pool.api.leasing import HasLeases
from stepwell.pool.client import DataPool
from stepwell.steps.running_statistics import NO_PAST, statistics_of
from stepwell.trainers.checkpoint import TrainedLedger
from stepwell.trainers.learnable import LearningMonitor
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.rows import TrainedRows, choose_rows
from stepwell.trainers.settings import choose_old_logprobs
from stepwell.trainers.verl.feed_state import FeedState
from stepwell.trainers.verl.mode_settings import PoolModeSettings
from stepwell.trainers.verl.queue_rows import QueueRow, queue_rows

log = logging.getLogger("stepwell.trainers")


@dataclass(frozen=True, slots=True, eq=False)
class TakenBatch:
    """Rows to train, and what else is to be known of their batch."""

    rows: list[QueueRow]
    metrics: Mapping[str, float]
    leases: tuple[tuple[str, str], ...]
    chosen: TrainedRows


class PoolFeed:
    def __init__(self, pool: DataPool, settings: PoolModeSettings) -> None:
        self._pool = pool
        self._settings = choose_old_logprobs(
            settings, ("current", "recorded"), "verl computes log-probabilities by the weights that it has now"
        )
        self._ledger = TrainedLedger()
        self._past = NO_PAST
        self._monitor = LearningMonitor(settings.max_unlearnable)
        self._in_hand: list[TakenBatch] = []
        self._has_warned = False
        self.version = 0
        """The pool's version of the weights that are trained now."""

    # -- batches -------------------------------------------------------------------------------------------------------

    def take(self, count: int, max_age: int | None = None) -> TakenBatch:
        """A batch of so many groups with something to train.

        Groups with a token that is more than `max_age` versions old are not trained. FetchTimeout says what is missing;
        NothingLearned ends the training.
        """
        began, settings, counts = time.monotonic(), self._settings, Counter[str]()
        while True:
            batch = self._pool.fetch_batch(
                count,
                timeout=settings.fetch_timeout,
                lease=settings.lease,
                channel=settings.channel,
                unit=settings.unit,
            )
            stale = set[str]() if max_age is None else _older_than(batch, self.version - max_age)
            chosen = choose_rows(batch, _Either(self._ledger, stale), settings, self._past)
            rows, too_long = queue_rows(chosen, settings.max_row_tokens)
            counts.update(self._count(batch, chosen, stale), rows_too_long=too_long)
            metrics = {**counts, **self._measure(chosen, rows), "fetch_seconds": time.monotonic() - began}
            taken = TakenBatch(rows, metrics, batch.leases, chosen)
            self._in_hand.append(taken)
            self._warn_of(too_long)
            self._monitor.check(chosen, self.version)
            if rows:
                return taken
            self.count_as_trained()

    def count_as_trained(self) -> None:
        """What was taken is in the weights."""
        for taken in self._in_hand:
            self._ledger.add(taken.leases, taken.chosen.uids)
            self._past = taken.chosen.statistics
        self._in_hand = []

    def acknowledge(self) -> None:
        """What counts as trained does not come back. If the pool is away, the next call tries again."""
        self._ledger.acknowledge(self._pool)

    def give_back(self) -> None:
        """The weights since the last acknowledgement are lost, so what was trained into them comes again."""
        held: list[HasLeases] = [*self._in_hand, self._ledger]
        for leased in held:
            with suppress(StepwellError):  # the leases expire by themselves
                self._pool.nack(leased)
        self._in_hand = []

    # -- versions and checkpoints --------------------------------------------------------------------------------------

    def begin(self, saved: FeedState | None) -> None:
        """Continue from the state of a checkpoint, if there is one, with a version that the pool has not seen of other
        weights."""
        if saved is not None:
            self._ledger = TrainedLedger(saved.leases, saved.trajectories)
            self._past = statistics_of(saved.statistics)
            self.version = saved.version
            self.acknowledge()
        newest = self._pool.stats().policy_version
        self.version = self.version if newest <= self.version else newest + 1

    def state(self) -> FeedState:
        """For the checkpoint of weights that are not synced yet: they get the next version."""
        return FeedState(
            version=self.version + 1,
            leases=list(self._ledger.leases),
            trajectories=self._ledger.trained,
            statistics=self._past.as_numbers(),
        )

    # -- reports -------------------------------------------------------------------------------------------------------

    def _count(self, batch: TrainingBatch, chosen: TrainedRows, stale: Container[str]) -> Counter[str]:
        """What was leased: over all batches until one has something to train."""
        return Counter(
            groups=len(np.unique(batch.group_of_T)),
            groups_evicted=_groups_of(batch, stale),
            steps=len(batch.columns),
            rollouts=len(chosen.uids_T),
            rollouts_again=sum(uid in self._ledger for uid in chosen.uids_T),
        )

    def _measure(self, chosen: TrainedRows, rows: list[QueueRow]) -> dict[str, float]:
        """What is trained of the last batch, and what is left out of it."""
        versions = chosen.merged.versions[chosen.trained]
        return {
            "reward": chosen.reward,
            "rollouts_trained": len({(row.group, row.rollout) for row in rows}),
            "rows": len(rows),
            "tokens": sum(int(row.mask.sum()) for row in rows),
            "staleness": float(self.version - versions.mean()) if len(versions) else 0.0,
            **asdict(chosen.left_out),
            **asdict(chosen.filled_in(self.version)),
        }

    def _warn_of(self, too_long: int) -> None:
        if too_long and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d rows have more than %s tokens and are not trained; raise data.max_prompt_length or "
                "data.max_response_length. This is said once and counted",
                too_long,
                self._settings.max_row_tokens,
            )


@dataclass(frozen=True, slots=True)
class _Either:
    """A name that is in one of them."""

    first: Container[str]
    second: Container[str]

    def __contains__(self, name: object) -> bool:
        return name in self.first or name in self.second


def _older_than(batch: TrainingBatch, version: int) -> set[str]:
    """The rollouts with a step of an older version."""
    columns = batch.columns
    spans: Iterable[tuple[int, ...]] = (tuple(span.version for span in of_step) for of_step in columns.version_spans)
    oldest_S = [min(of_step, default=told) for of_step, told in zip(spans, columns.policy_versions_S, strict=True)]
    return {uid for uid, oldest in zip(columns.trajectory_uids, oldest_S, strict=True) if oldest < version}


def _groups_of(batch: TrainingBatch, uids: Container[str]) -> int:
    groups_S = batch.group_of_T[batch.trajectory_of_S].tolist()
    return len({group for group, uid in zip(groups_S, batch.columns.trajectory_uids, strict=True) if uid in uids})
