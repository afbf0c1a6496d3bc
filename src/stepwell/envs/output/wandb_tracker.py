"""WandbTracker: logs an environment's metrics to Weights & Biases, and never blocks the environment.

- No call waits: wandb runs in its own thread behind a bounded queue. Entries that do not fit are counted, and the count
  is logged with the next entry.
- If wandb fails or is missing, that is logged once and then ignored.
- WANDB_MODE=offline writes a run for `wandb sync`.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from stepwell.common.imports import require

log = logging.getLogger("stepwell.envs")

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
        self._load = load or _wandb
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
        tables = {name: value for name, value in metrics.items() if isinstance(value, RolloutTable)}
        made = {name: self._try("table", partial(_table, wandb, table)) for name, table in tables.items()}
        return {name: value for name, value in (metrics | made).items() if name not in tables or value is not None}

    def _try(self, what: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as failure:  # noqa: BLE001 - a failure of wandb must not reach the environment
            if what not in self._failed:
                log.warning("wandb (%s) fails; the environment goes on: %s: %s", what, type(failure).__name__, failure)
            self._failed.add(what)
            return None


def _table(wandb: Any, table: RolloutTable) -> Any:
    return wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])


def _wandb() -> Any:
    return require("wandb", "wandb", purpose="use_wandb")
