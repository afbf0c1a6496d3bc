"""The failures, rollouts, lengths, durations and evaluations of an environment: counted, logged, and sent to W&B.

- The methods of EnvTracking are hooks that authors override. The names of metrics and attributes are Atropos', so that
  dashboards and subclasses written for it go on.
- Every failure is counted by its cause. Its traceback is logged once; the same failure is only counted after that.
  Groups that were in progress together when one failed count as one failure: only a group that began after the last
  failure makes the sequence of failures longer.
- Weights & Biases never blocks the environment: it runs in its own thread behind a bounded queue. Entries that do not
  fit are counted, and the count is logged with the next entry. If wandb fails or is missing, that is logged once and
  then ignored. WANDB_MODE=offline writes a run for `wandb sync`.
"""

import asyncio
import json
import logging
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stepwell.common.imports import require
from stepwell.envs.config import BaseEnvConfig
from stepwell.envs.scored_data import Item, ScoredDataGroup
from stepwell.errors import EnvironmentFailed

log = logging.getLogger("stepwell.envs")


class FailureCount:
    def __init__(
        self,
        limit: int = 12,
        *,
        first_pause: float = 0.1,
        longest_pause: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The environment gives up after `limit` failures in a row. It pauses for `first_pause` seconds after the first
        one; each further failure doubles the pause."""
        self.dropped = Counter[str]()
        """Dropped groups and failed calls of the environment's code, by cause."""
        self.in_a_row = 0
        self.last_failure = ""
        self._failed_at = float("-inf")
        self._limit, self._first_pause, self._longest_pause = limit, first_pause, longest_pause
        self.now = clock
        self._logged = set[str]()

    def check(self) -> None:
        """EnvironmentFailed after too many failures in a row."""
        if self.in_a_row >= self._limit:
            raise EnvironmentFailed(f"{self.in_a_row} failures in a row, the last one in {self.last_failure}")

    @property
    def is_pausing(self) -> bool:
        """Whether the next group must wait because one failed recently."""
        if not self.in_a_row:
            return False
        pause = min(self._longest_pause, self._first_pause * 2.0 ** min(self.in_a_row - 1, 32))
        return self.now() < self._failed_at + pause

    def drop(self, cause: str, why: str = "") -> None:
        self.dropped[cause] += 1
        if why and self.dropped[cause] == 1:
            log.warning("a group is dropped (%s): %s; more of these are only counted", cause, why)

    def succeed(self) -> None:
        """A group was made, whether it is sent or not."""
        self.in_a_row = 0

    @contextmanager
    def catching(self, cause: str, began_at: float | None = None) -> Iterator[None]:
        """Around every call of the environment's code. `began_at` is the start of the group that the call is for."""
        try:
            yield
        except Exception as failure:  # noqa: BLE001 - an author's code raises anything; one failure must not end the run
            self.fail(cause, failure, began_at)

    def fail(self, cause: str, failure: BaseException, began_at: float | None = None) -> None:
        self.drop(cause)
        self.last_failure = f"{cause}: {type(failure).__name__}: {failure}"
        raised_at = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(failure.__traceback__)[-1:]]
        key = f"{cause} {type(failure).__name__} {raised_at}"
        if key not in self._logged:
            self._logged.add(key)
            log.error("%s; the same again is only counted", self.last_failure, exc_info=failure)
        if began_at is not None and began_at >= self._failed_at:
            self.in_a_row += 1
            self._failed_at = self.now()


# -- Weights & Biases --------------------------------------------------------------------------------------------------

QUEUE_SIZE = 256
"""Calls of `log` that may wait for wandb."""
CLOSE_TIMEOUT = 30.0
"""Seconds that `close` waits until wandb has received the rest."""
TABLE = "train/rollouts"
DROPPED = "tracking/dropped"


class RolloutTable(NamedTuple):
    """A metric that wandb's thread makes a table of."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


WandbEntry: TypeAlias = tuple[dict[str, Any], int | None]
"""Metrics and their step."""


class WandbTracker:
    """A run of Weights & Biases. Before `start`, every call is accepted and does nothing."""

    def __init__(
        self,
        *,
        queue_size: int = QUEUE_SIZE,
        close_timeout: float = CLOSE_TIMEOUT,
        load: Callable[[], Any] | None = None,
    ) -> None:
        self.dropped = 0
        """Calls of `log` that did not fit."""
        self._entries: queue.Queue[WandbEntry | None] = queue.Queue(queue_size)
        self._close_timeout = close_timeout
        self._load = load or partial(require, "wandb", "wandb", purpose="use_wandb")
        self._thread: threading.Thread | None = None
        self._failed: set[str] = set()

    @property
    def is_on(self) -> bool:
        return self._thread is not None

    def start(self, run: Mapping[str, Any]) -> None:
        """`run` are the arguments of wandb.init."""
        self._thread = threading.Thread(target=self._write, args=(run,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self.is_on:
            return
        dropped = {DROPPED: self.dropped} if self.dropped else {}
        try:
            self._entries.put_nowait(({**metrics, **dropped}, step))
        except queue.Full:
            self.dropped += 1

    async def close(self) -> None:
        """Waits for a while until wandb has received the queue."""
        if self._thread is not None:
            await asyncio.to_thread(self._end_thread, self._thread)
            self._thread = None

    def _end_thread(self, thread: threading.Thread) -> None:
        with suppress(queue.Full):
            self._entries.put(None, timeout=self._close_timeout)
            thread.join(self._close_timeout)
        if thread.is_alive():
            log.warning("wandb did not end within %g s: what it had not received is lost", self._close_timeout)

    # -- in wandb's thread: only it calls wandb, and it handles all its failures ---------------------------------------

    def _write(self, arguments: Mapping[str, Any]) -> None:
        wandb = self._try("import", self._load)
        run = wandb and self._try("init", lambda: wandb.init(**arguments))
        while (entry := self._entries.get()) is not None:
            if run is not None:
                metrics, step = entry
                self._try("log", partial(run.log, self._with_tables(wandb, metrics), step=step))
        if run is not None:
            self._try("finish", run.finish)

    def _with_tables(self, wandb: Any, metrics: dict[str, Any]) -> dict[str, Any]:
        """A table that cannot be made is left out."""

        def make(table: RolloutTable) -> Any:
            return wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])

        tables = {name: value for name, value in metrics.items() if isinstance(value, RolloutTable)}
        made = {name: self._try("table", partial(make, table)) for name, table in tables.items()}
        return {name: value for name, value in (metrics | made).items() if name not in tables or value is not None}

    def _try(self, what: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as failure:  # noqa: BLE001 - a failure of wandb must not reach the environment
            if what not in self._failed:
                log.warning("wandb (%s) fails; the environment goes on: %s: %s", what, type(failure).__name__, failure)
            self._failed.add(what)
            return None


def write_evaluation(
    folder: Path,
    metrics: Mapping[str, Any],
    *,
    task: str,
    model_name: str | None,
    start_time: float | None,
    end_time: float | None,
    generation_parameters: Mapping[str, Any],
    samples: Sequence[Any] | None,
) -> None:
    """metrics.json, and samples.jsonl if there are samples."""
    end = time.time() if end_time is None else end_time
    general = {
        "model_name": model_name,
        "total_evaluation_time_seconds": str(end - (end if start_time is None else start_time)),
        "generation_parameters": dict(generation_parameters),
    }
    results = {f"atropos|{task}|0": dict(metrics), "all": dict(metrics)}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"config_general": general, "results": results}, indent=2))
    if samples:
        (folder / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))


# -- the hooks ---------------------------------------------------------------------------------------------------------

DURATIONS = {
    "task_duration": "train_perf/task_duration",
    "succeeded_task_duration": "train_perf/succeeded_task_duration",
    "failed_task_duration": "train_perf/failed_task_duration",
    "mainloop_timings": "train_perf/mainloop_timings",
    "workers_added_list": "train_perf/workers_added_per_attempt",
}
"""Attributes with a number per event, and their metrics."""


class EnvTracking:
    name: str
    config: BaseEnvConfig
    tokenizer: Any

    def __init__(self, config: BaseEnvConfig) -> None:
        self.config = config
        self.curr_step = 0
        """The trainer's step."""
        self.groups_delivered = 0
        """Groups sent, or written."""
        self.failure_count = FailureCount()
        self.wandb = WandbTracker()
        self.wandb_prepend: str | None = None
        """The environment's name at the rollout server; it begins the names of all metrics."""
        self.max_token_len = -1
        """The longest sequence that the trainer accepts; -1 before it is known, or without a limit."""
        self.rollouts_for_wandb: list[Any] = []
        """One entry per group, for the next table."""
        self.completion_lengths: list[int] = []
        """Trained tokens of each rollout since the last log."""
        self.task_duration: list[float] = []
        """Seconds that items took since the last log; the same for items that gave groups, and for the others."""
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[float] = []

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item = None) -> None:
        """Called with each group that is sent: keeps texts and scores for the next table."""
        if self.wandb.is_on:
            count = self.config.num_rollouts_per_group_for_logging
            kept = list(zip(scored_data["tokens"], scored_data["scores"], strict=True))[
                : None if count == -1 else count
            ]
            texts = await asyncio.to_thread(lambda: [str(self.tokenizer.decode(tokens)) for tokens, _ in kept])
            self.rollouts_for_wandb.append([(text, score) for text, (_, score) in zip(texts, kept, strict=True)])
            del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep or None]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Called by wandb_log: adds the table of rollouts_for_wandb to the metrics."""
        rows = [row for group in self.rollouts_for_wandb for row in group]
        return {**wandb_metrics, TABLE: RolloutTable(("text", "score"), rows)} if rows else wandb_metrics

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Called by wandb_log: adds durations and numbers of workers to the metrics, and starts their lists anew."""
        for attribute, metric in DURATIONS.items():
            values: list[float] = vars(self)[attribute]
            if len(values) > 1:
                metrics_dict |= _spread(metric, values)
                vars(self)[attribute] = []
        return metrics_dict

    async def wandb_log(self, wandb_metrics: Mapping[str, Any] | None = None) -> None:
        """Called after training steps and evaluations. A subclass adds its metrics and calls this method last."""
        metrics: dict[str, Any] = {"train/groups_sent": self.groups_delivered, **(wandb_metrics or {})}
        metrics |= {f"dropped/{cause.replace(' ', '_')}": n for cause, n in self.failure_count.dropped.items()}
        if self.completion_lengths:
            lengths = _spread("train/completion_lengths", self.completion_lengths)
            lengths["train/completion_lengths"] = lengths.pop("train/completion_lengths_mean")
            long = np.array(self.completion_lengths) > 0.95 * self.max_token_len
            metrics |= {**lengths, "train/completion_lengths_p95": float(long.mean())}
        metrics = self.perf_stats(await self.create_rollout_table(metrics))
        self.rollouts_for_wandb, self.completion_lengths = [], []
        self.log_to_wandb(metrics)
        self.wandb.log(await self.server_metrics(), self.curr_step)  # without a name: environments share servers

    async def server_metrics(self) -> dict[str, Any]:
        """Called by wandb_log: the metrics of the servers."""
        return {}

    def log_to_wandb(self, metrics: Mapping[str, Any]) -> None:
        """Logs exactly these metrics at the trainer's step, with the environment's name before theirs."""
        prefix = f"{self.wandb_prepend}_" if self.wandb_prepend else ""
        self.wandb.log({f"{prefix}{name}": value for name, value in metrics.items()}, self.curr_step)

    async def evaluate_log(
        self,
        metrics: Mapping[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Writes metrics.json, and samples.jsonl if there are samples, to config.data_dir_to_save_evals."""
        if self.config.data_dir_to_save_evals is None:
            log.warning("an evaluation is not saved: data_dir_to_save_evals is not set")
            return
        task = task_name or f"{self.name}_eval"
        folder = Path(self.config.data_dir_to_save_evals)
        await asyncio.to_thread(
            write_evaluation,
            folder,
            metrics,
            task=task,
            model_name=model_name,
            start_time=start_time,
            end_time=end_time,
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=samples,
        )
        if verbose:
            log.info("evaluation %s: %s; saved in %s", task, dict(metrics), folder)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    own = np.array(values, np.float64)
    statistics = {"mean": own.mean(), "std": own.std(), "max": own.max(), "min": own.min()}
    return {f"{name}_{statistic}": float(value) for statistic, value in statistics.items()}
