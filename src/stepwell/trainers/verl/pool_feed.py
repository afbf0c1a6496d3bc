"""The feed of verl's trainer: groups of the pool as rows for verl's queue.

- What is trained stays leased until `acknowledge`, which the trainer calls when a checkpoint with it is on disk, or,
  without checkpoints, after the step.
- A group that teaches nothing, or that is too old for the trainer, is settled like a trained one, and does not come
  back.
"""

import logging
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from stepwell.pool.client import DataPool
from stepwell.trainers.feed import Feed, FeedState, read_state, write_state
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.rows import TrainedRows
from stepwell.trainers.settings import choose_old_logprobs
from stepwell.trainers.verl.mode_settings import PoolModeSettings

log = logging.getLogger("stepwell.trainers")

FILE = "stepwell.json"
"""The name of the state in a checkpoint of verl."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VerlState(FeedState):
    """The state that is kept beside a checkpoint of verl, so that a resumed run neither loses nor repeats a group."""

    version: int
    """The version of the checkpoint's weights in the pool."""


@dataclass(frozen=True, slots=True, eq=False)
class TakenBatch:
    """Rows to train, and what else is to be known of their batch."""

    rows: list[QueueRow]
    metrics: Mapping[str, float]
    chosen: TrainedRows


class PoolFeed(Feed):
    def __init__(self, pool: DataPool, settings: PoolModeSettings) -> None:
        chosen = choose_old_logprobs(
            settings, ("current", "recorded"), "verl computes log-probabilities by the weights that it has now"
        )
        super().__init__(pool, chosen)
        self._max_row_tokens = settings.max_row_tokens
        self._has_warned = False
        self.version = 0
        """The pool's version of the weights that are trained now."""

    # -- batches -------------------------------------------------------------------------------------------------------

    def take_rows(self, count: int, max_age: int | None = None) -> TakenBatch:
        """A batch of so many groups with something to train.

        Groups with a token that is more than `max_age` versions old are not trained. FetchTimeout says what is missing;
        NothingLearned ends the training.
        """
        began, counts = time.monotonic(), Counter[str]()
        while True:
            batch = self.fetch(count)
            stale = set[str]() if max_age is None else _older_than(batch, self.version - max_age)
            chosen = self.choose(stale).rows
            counts.update(self._count(batch, chosen, stale))
            rows, too_long = queue_rows(chosen, self._max_row_tokens)
            counts["rows_too_long"] += too_long
            metrics = {**counts, **self._measure(chosen, rows), "fetch_seconds": time.monotonic() - began}
            self._warn_of(too_long)
            self.monitor.check(chosen, self.version)
            if rows:
                return TakenBatch(rows, metrics, chosen)
            self.count_as_trained()

    # -- versions and checkpoints --------------------------------------------------------------------------------------

    def begin(self, checkpoint: Path | None) -> None:
        """Continue from the state in a checkpoint's folder, if there is one, with a version that the pool has not seen
        of other weights. A checkpoint of another trainer mode has none."""
        saved = None if checkpoint is None else read_state(VerlState, checkpoint / FILE)
        if saved is not None:
            self.restore(saved)
            self.version = saved.version
            self.acknowledge()
        self.version = self.unseen_version(self.version)

    def save(self, checkpoint: Path) -> None:
        """Writes the state into the folder of a checkpoint, whose weights are not synced yet: they get the next
        version."""
        write_state(checkpoint / FILE, VerlState(version=self.version + 1, **asdict(self.state())))

    # -- reports -------------------------------------------------------------------------------------------------------

    def _count(self, batch: TrainingBatch, chosen: TrainedRows, stale: Container[str]) -> Counter[str]:
        """The counts of what was leased, summed over all batches until one has something to train."""
        not_new = (uid for uid, is_new in zip(chosen.uids_T, chosen.is_new_T.tolist(), strict=True) if not is_new)
        return Counter(
            groups=len(np.unique(batch.group_of_T)),
            groups_evicted=_groups_of(batch, stale),
            steps=len(batch.columns),
            rollouts=len(chosen.uids_T),
            rollouts_again=sum(uid in self for uid in not_new),
        )

    def _measure(self, chosen: TrainedRows, rows: list[QueueRow]) -> dict[str, float]:
        """The measures of what is trained of the last batch, and what is left out of it."""
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
                self._max_row_tokens,
            )


def _older_than(batch: TrainingBatch, version: int) -> set[str]:
    """The rollouts with a step of an older version."""
    columns = batch.columns
    spans: Iterable[tuple[int, ...]] = (tuple(span.version for span in of_step) for of_step in columns.version_spans)
    oldest_S = [min(of_step, default=told) for of_step, told in zip(spans, columns.policy_versions_S, strict=True)]
    return {uid for uid, oldest in zip(columns.trajectory_uids, oldest_S, strict=True) if oldest < version}


def _groups_of(batch: TrainingBatch, uids: Container[str]) -> int:
    groups_S = batch.group_of_T[batch.trajectory_of_S].tolist()
    return len({group for group, uid in zip(groups_S, batch.columns.trajectory_uids, strict=True) if uid in uids})
