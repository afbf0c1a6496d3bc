"""The metrics of an update, and reports of them: the console, a JSONL file, Weights & Biases.

Invariant: a report never stops training. A report that fails is logged once and not called again.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, TextIO, TypeAlias

import numpy as np

from stepwell.common.imports import require
from stepwell.trainers.learner import Learned
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.rows import TrainedRows, came_to_no_end

log = logging.getLogger("stepwell.trainers")

WAITING = 1000
"""Updates that can wait for wandb; further ones are not sent to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics(Learned):
    """One update in numbers."""

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
    groups_single: int = 0
    groups_identical: int = 0
    groups_equal: int = 0
    rollouts_unscored: int = 0
    rollouts_without_logprobs: int = 0
    rollouts_overlong: int = 0
    steps_other_temperature: int = 0
    steps_unknown_temperature: int = 0
    steps_unusable_advantages: int = 0
    """The first count of what was left out, by reason: see LeftOut."""
    logprobs_recomputed: int = 0
    logprobs_current: int = 0
    logprobs_staleness: float = 0.0
    temperatures_assumed: int = 0
    """The first count of what the data lacked and was filled in: see FilledIn."""
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
    batch: TrainingBatch,
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
