"""Metrics for people and tools: the console, a JSONL file, Weights & Biases. Each can be one of a trainer's reports.

What always holds: reports are readers. One that fails is told of in the log and then left alone; training goes on.
"""

import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, TextIO, TypeAlias

from stepwell.common.optional import needed
from stepwell.trainers.metrics import Metrics

log = logging.getLogger("stepwell.trainers")

Report: TypeAlias = Callable[[Metrics], None]

WAITING = 1000
"""Updates that wandb may be behind before it misses some."""


class ToConsole:
    """One line an update."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def __call__(self, metrics: Metrics) -> None:
        seconds = metrics.fetch_seconds + metrics.train_seconds + metrics.save_seconds + metrics.sync_seconds
        self._stream.write(
            f"update {metrics.update:4d}  reward {metrics.reward:6.3f}  loss {metrics.loss:+.4f}  "
            f"clipped {metrics.clipped:4.0%}  stale {metrics.staleness:4.1f}  tokens {metrics.tokens:6d}  "
            f"{seconds:.2f} s (waited {metrics.fetch_seconds:.2f})\n"
        )
        self._stream.flush()


class ToJsonl:
    """One JSON object an update, appended; what is no number is null."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, metrics: Metrics) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(as_numbers(metrics)) + "\n")


class ToWandb:
    """To Weights & Biases, from a thread of its own: training does not wait for a network. `close` sends what is left.

    `options` are those of wandb.init.
    """

    def __init__(self, project: str, **options: Any) -> None:
        self._wandb = needed("wandb", "wandb")
        self._queue: Queue[Metrics | None] = Queue(WAITING)
        self._thread = Thread(target=self._send, args=(project, options), name="stepwell-wandb", daemon=True)
        self._thread.start()

    def __call__(self, metrics: Metrics) -> None:
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


def heard(report: Report) -> Report:
    """The same, but nothing that goes wrong in it reaches training."""
    has_failed = False

    def listen(metrics: Metrics) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            report(metrics)
        except Exception:
            has_failed = True
            log.exception("a report of metrics failed and is not made any more; training goes on")

    return listen


def as_numbers(metrics: Metrics) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(metrics).items()}
