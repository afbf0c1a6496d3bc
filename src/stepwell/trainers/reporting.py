"""The metrics of an update, and reports of them: the console, a JSONL file, Weights & Biases; and the monitor, which
sees whether batches teach anything.

- A report never stops training. A report that fails is logged once and not called again.
- The first batch that teaches nothing is reported, and a run of them ends the training. Without this, a trainer
  acknowledges group after group and its weights stay the same.
"""

import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, TextIO, TypeAlias

import numpy as np

from stepwell.common.imports import require
from stepwell.errors import NothingLearned
from stepwell.pool.client.batch import Batch
from stepwell.steps.rows import NO_VERSION
from stepwell.trainers.learner import Learned
from stepwell.trainers.rows import FilledIn, LeftOut, TrainedRows, came_to_no_end

log = logging.getLogger("stepwell.trainers")

WAITING = 1000
"""Updates that can wait for wandb; further ones are not sent to it."""
REASONS = {
    "groups_single": (
        "groups of one (a single scored rollout), which baseline group or leave_one_out compares with nothing",
        "set fallback_baseline to running if there are no others of a group, as in live sessions; else give the "
        "rollouts of one prompt the same prompt_uid, and groups two rollouts or more (group_size)",
    ),
    "groups_identical": (
        "groups whose rollouts are the same token for token",
        "sample at a temperature above 0 and without a fixed seed",
    ),
    "groups_equal": (
        "groups whose rollouts all have the same return, or that of their baseline",
        "check that the reward tells good answers from bad ones, or choose tasks that sometimes succeed",
    ),
    "rollouts_unscored": (
        "unscored rollouts",
        "give each rollout a reward when it ends, or start reward workers; if single steps are trained, give each a "
        "reward, and start the pool with --require-reward, so that it waits for them",
    ),
    "rollouts_without_logprobs": (
        "rollouts without log-probabilities",
        "use an engine that returns them, send them with the steps, or, where the trainer can, set old_logprobs to "
        "recomputed or current",
    ),
    "rollouts_overlong": (
        "rollouts whose last step did not come to its end",
        "let agents answer longer (max_tokens, the engine's context), or set filter_overlong to False",
    ),
    "steps_other_temperature": (
        "steps sampled at another temperature than the trainer's",
        "set the trainer's temperature to that of the samples",
    ),
    "steps_unknown_temperature": (
        "steps whose temperature is not known",
        "send the temperature with the steps, or set the trainer's assumed_temperature",
    ),
    "steps_unusable_advantages": (
        "steps whose own advantages are not one number for each token",
        "send a list with a number for each token of the sequence, or none",
    ),
}
"""Texts by the field of LeftOut: what was left out, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics(Learned, LeftOut, FilledIn):
    """One update in numbers, with how much of the batch's new groups was left out, and what was filled in."""

    update: int
    version: int
    """The version of the weights that the engines have now; stays 0 if this trainer does not sync them."""
    reward: float
    """The mean return of the batch's scored rollouts; NaN if there is none."""
    truncated: float = 0.0
    """The share of the batch's steps that ended because they reached their largest length."""
    refills: int = 0
    """How often more groups were fetched in place of those that teach nothing."""
    rollouts: int
    rollouts_trained: int
    """The others were trained before, or are among those counted below."""
    rows: int
    tokens: int
    """The number of trained tokens."""
    staleness: float
    """Mean number of versions between the weights that sampled a trained token and those before this update."""
    fetch_seconds: float
    train_seconds: float
    save_seconds: float
    sync_seconds: float
    logprob_gap: float
    """The largest difference between the engines' log-probabilities and the trainer's after the sync; NaN if they were
    not compared."""


Report: TypeAlias = Callable[[UpdateMetrics], None]


class Stopwatch:
    """How long the parts of an update took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - began


def measure(
    batch: Batch,
    rows: TrainedRows,
    learned: Learned,
    stopwatch: Stopwatch,
    *,
    update: int,
    before: int,
    version: int,
    gap: float | None,
    refills: int,
) -> UpdateMetrics:
    """`before` is the version of the weights before the update, `version` the one after it."""
    seconds = {f"{part}_seconds": stopwatch.seconds[part] for part in ("fetch", "train", "save", "sync")}
    return UpdateMetrics(
        **(asdict(learned) | asdict(rows.left_out) | asdict(rows.filled_in(before)) | seconds),
        update=update,
        version=version,
        reward=rows.reward,
        truncated=float(came_to_no_end(batch.columns).mean()),
        refills=refills,
        rollouts=len(rows.uids_T),
        rollouts_trained=len(np.unique(rows.merged.trajectory_of_R[rows.chosen_R])),
        rows=len(rows.chosen_R),
        tokens=rows.tokens,
        staleness=float(rows.versions_behind(before).mean()) if rows.tokens else 0.0,
        logprob_gap=float("nan") if gap is None else gap,
    )


class ToConsole:
    """Writes one line per update."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def __call__(self, metrics: UpdateMetrics) -> None:
        seconds = metrics.fetch_seconds + metrics.train_seconds + metrics.save_seconds + metrics.sync_seconds
        computed = metrics.logprobs_recomputed + metrics.logprobs_current
        without = f"  without logprobs {computed:6d}" if computed else ""
        self._stream.write(
            f"update {metrics.update:4d}  reward {metrics.reward:6.3f}  loss {metrics.loss:+.4f}  "
            f"clipped {metrics.clipped:4.0%}  stale {metrics.staleness:4.1f}  tokens {metrics.tokens:6d}{without}  "
            f"{seconds:.2f} s (waited {metrics.fetch_seconds:.2f})\n"
        )
        self._stream.flush()


class ToJsonl:
    """Appends one JSON object per update; NaN and infinity are written as null."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, metrics: UpdateMetrics) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(as_numbers(metrics)) + "\n")


class ToWandb:
    """Sends metrics to Weights & Biases from its own thread, so training does not wait for the network.

    `options` are those of wandb.init. `close` sends what is still queued.
    """

    def __init__(self, project: str, **options: Any) -> None:
        self._wandb = require("wandb", "wandb")
        self._queue: Queue[UpdateMetrics | None] = Queue(WAITING)
        self._thread = Thread(target=self._send, args=(project, options), name="stepwell-wandb", daemon=True)
        self._thread.start()

    def __call__(self, metrics: UpdateMetrics) -> None:
        try:
            self._queue.put_nowait(metrics)
        except Full:
            log.warning("wandb is %d updates behind; update %d is not sent to it", WAITING, metrics.update)

    def close(self, timeout: float = 30.0) -> None:
        self._queue.put(None, timeout=timeout)
        self._thread.join(timeout)

    def _send(self, project: str, options: dict[str, Any]) -> None:
        run = self._wandb.init(project=project, **options)
        while (metrics := self._queue.get()) is not None:
            run.log(as_numbers(metrics), step=metrics.update)
        run.finish()


def guarded(report: Report) -> Report:
    """The same report; its first exception is logged, and it is not called again."""
    has_failed = False

    def call_report(metrics: UpdateMetrics) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            report(metrics)
        except Exception:
            has_failed = True
            log.exception("a report of metrics failed and is not called again; training continues")

    return call_report


def as_numbers(metrics: UpdateMetrics) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(metrics).items()}


class LearningMonitor:
    """Sees every batch (or group) that a trainer takes. `limit` is how many in a row may teach nothing."""

    def __init__(self, limit: int | None, unit: str = "batches") -> None:
        self._limit = limit
        self._unit = unit
        self._in_a_row = 0
        self._left_out: Counter[str] = Counter()
        """The counts since the last batch that taught something."""
        self._reported: set[str] = set()

    def check(self, rows: TrainedRows, version: int = NO_VERSION) -> None:
        """NothingLearned if this is one too many. `version` is that of the weights before the update, if it is
        known."""
        if not rows.is_new_T.any():
            return
        self._say_what_lacks(rows, version)
        counts = Counter({reason: count for reason, count in asdict(rows.left_out).items() if count})
        for reason in counts.keys() - self._reported:
            self._reported.add(reason)
            what, remedy = REASONS[reason]
            log.warning("%d %s are not trained; %s. This is said once and counted", counts[reason], what, remedy)
        if rows.tokens:
            self._in_a_row, self._left_out = 0, Counter()
            return
        self._in_a_row += 1
        self._left_out += counts
        if self._in_a_row == 1:
            log.warning("nothing can be learned from this data: %s", self._explanation())
        if self._limit is not None and self._in_a_row >= self._limit:
            raise NothingLearned(
                f"nothing could be learned from {self._in_a_row} {self._unit} in a row: {self._explanation()}"
            )

    def _say_what_lacks(self, rows: TrainedRows, version: int) -> None:
        """Says once how data that lacks log-probabilities or temperatures is trained all the same."""
        filled, lacks = rows.filled_in(version), dict[str, str]()
        if missing := filled.logprobs_recomputed + filled.logprobs_current:
            lacks["logprobs"] = (
                f"{missing} of {rows.tokens} trained tokens have no recorded log-probability: "
                f"{filled.logprobs_recomputed} have that of the weights that sampled them, and "
                f"{filled.logprobs_current} that of the current weights, which are {filled.logprobs_staleness:.1f} "
                "versions newer on average (old_logprobs)"
            )
        if filled.temperatures_assumed:
            lacks["temperatures"] = (
                f"{filled.temperatures_assumed} steps do not tell their temperature and are taken for sampled at the "
                "assumed one (assumed_temperature)"
            )
        if said := [text for kind, text in lacks.items() if kind not in self._reported]:
            self._reported |= lacks.keys()
            log.warning("not all is known of this data: %s. This is said once and counted", "; ".join(said))

    def _explanation(self) -> str:
        """The reasons, the most frequent first, and what to do about that one."""
        ordered = [(REASONS[reason], count) for reason, count in self._left_out.most_common()]
        if not ordered:
            return "no token is marked to be trained"
        return "; ".join(f"{count} {what}" for (what, _), count in ordered) + f". To do: {ordered[0][0][1]}"
