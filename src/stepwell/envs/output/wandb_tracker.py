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
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from stepwell.common.optional import require
from stepwell.common.tokenizers import Decode
from stepwell.envs.scored_data import ScoredDataGroup

log = logging.getLogger("stepwell.envs")

QUEUE_SIZE = 256
"""Calls of `log` that may wait for wandb."""
CLOSE_TIMEOUT = 30.0
"""Seconds that `close` waits until wandb has received the rest."""
TABLE = "train/rollouts"
DROPPED = "tracking/dropped"


@dataclass(frozen=True, slots=True)
class WandbRun:
    """The arguments of wandb.init."""

    name: str
    project: str | None = None
    group: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrackedRollout:
    tokens: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class WandbEntry:
    metrics: dict[str, Any]
    step: int | None
    rollouts: list[TrackedRollout]
    """For the table; decoded in wandb's thread."""


class WandbTracker:
    """Before `start`, every call is accepted and does nothing."""

    def __init__(
        self,
        rollouts_to_keep: int = 32,
        *,
        queue_size: int = QUEUE_SIZE,
        close_timeout: float = CLOSE_TIMEOUT,
        load: Callable[[], Any] | None = None,
    ) -> None:
        self.dropped = 0
        """Calls of `log` that did not fit."""
        self._rollouts: deque[TrackedRollout] = deque(maxlen=rollouts_to_keep)
        self._entries: queue.Queue[WandbEntry | None] = queue.Queue(queue_size)
        self._close_timeout = close_timeout
        self._load = load or _wandb
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        return self._thread is not None

    def start(self, run: WandbRun, decode: Decode | None = None) -> None:
        """`decode` makes the texts of the table; without it, the table has token ids."""
        writer = WandbWriter(self._entries, self._load, run, decode or str)
        self._thread = threading.Thread(target=writer.serve, name="wandb", daemon=True)
        self._thread.start()

    def keep(self, group: ScoredDataGroup) -> None:
        """Keeps its rollouts for the next table."""
        if self.is_on:
            self._rollouts.extend(map(TrackedRollout, group["tokens"], group["scores"]))

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self.is_on:
            return
        dropped = {DROPPED: self.dropped} if self.dropped else {}
        try:
            self._entries.put_nowait(WandbEntry({**metrics, **dropped}, step, list(self._rollouts)))
        except queue.Full:
            self.dropped += 1
        else:
            self._rollouts.clear()

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


class WandbWriter:
    """The part that runs in the thread: only it calls wandb, and it handles all its failures."""

    def __init__(
        self,
        entries: "queue.Queue[WandbEntry | None]",
        load: Callable[[], Any],
        run: WandbRun,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._entries, self._load, self._run, self._decode = entries, load, run, decode
        self._logged: set[str] = set()

    def serve(self) -> None:
        wandb = self._try("import", self._load)
        run = wandb and self._try("init", lambda: wandb.init(**asdict(self._run)))
        while (entry := self._entries.get()) is not None:
            if run is not None:
                table = self._try("table", partial(self._table, wandb, entry.rollouts))
                self._try("log", partial(run.log, {**entry.metrics, **(table or {})}, step=entry.step))
        if run is not None:
            self._try("finish", run.finish)

    def _table(self, wandb: Any, rollouts: list[TrackedRollout]) -> dict[str, Any]:
        rows = [[self._decode(rollout.tokens), rollout.score] for rollout in rollouts]
        return {TABLE: wandb.Table(columns=["text", "score"], data=rows)} if rows else {}

    def _try(self, what: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as failure:  # noqa: BLE001 - a failure of wandb must not reach the environment
            if what not in self._logged:
                log.warning("wandb (%s) fails; the environment goes on: %s: %s", what, type(failure).__name__, failure)
            self._logged.add(what)
            return None


def _wandb() -> Any:
    return require("wandb", "wandb", purpose="use_wandb")
