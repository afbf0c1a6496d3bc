"""Runs in Weights & Biases: a reader of what an environment does, never a blocker.

What always holds: no call here waits, for wandb lives in a thread of its own behind a bounded queue; what does not fit
is counted, and the count is logged with what fits next. A wandb that fails, or is not there, is spoken of once and then
ignored. WANDB_MODE=offline writes a run to `wandb sync` later.
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

WAITING = 256
"""Calls of `log` that may wait for wandb."""
GOODBYE = 30.0
"""Seconds that closing waits for wandb to take what is left."""
TABLE = "train/rollouts"
DROPPED = "tracking/dropped"


@dataclass(frozen=True, slots=True)
class Run:
    """What wandb is told of a run."""

    name: str
    project: str | None = None
    group: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollout:
    tokens: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class Entry:
    metrics: dict[str, Any]
    step: int | None
    rollouts: list[Rollout]
    """For the table; decoded in the thread."""


class Tracker:
    """Until it is started, everything is accepted and nothing happens."""

    def __init__(
        self, rollouts_to_keep: int = 32, *, waiting: int = WAITING, load: Callable[[], Any] | None = None
    ) -> None:
        self.dropped = 0
        """Calls of `log` that did not fit."""
        self._rollouts: deque[Rollout] = deque(maxlen=rollouts_to_keep)
        self._entries: queue.Queue[Entry | None] = queue.Queue(waiting)
        self._load = load or _wandb
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        return self._thread is not None

    def start(self, run: Run, decode: Decode | None = None) -> None:
        """`decode` gives the texts of the table; without it, it has token ids."""
        writer = _Writer(self._entries, self._load, run, decode or str)
        self._thread = threading.Thread(target=writer.serve, name="wandb", daemon=True)
        self._thread.start()

    def keep(self, group: ScoredDataGroup) -> None:
        """Remember its rollouts for the next table."""
        if self.is_on:
            self._rollouts.extend(map(Rollout, group["tokens"], group["scores"]))

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self.is_on:
            return
        dropped = {DROPPED: self.dropped} if self.dropped else {}
        try:
            self._entries.put_nowait(Entry({**metrics, **dropped}, step, list(self._rollouts)))
        except queue.Full:
            self.dropped += 1
        else:
            self._rollouts.clear()

    async def close(self) -> None:
        """Let wandb take what waits, for a while."""
        if self._thread is not None:
            await asyncio.to_thread(self._say_goodbye, self._thread)
            self._thread = None

    def _say_goodbye(self, thread: threading.Thread) -> None:
        with suppress(queue.Full):
            self._entries.put(None, timeout=GOODBYE)
            thread.join(GOODBYE)
        if thread.is_alive():
            log.warning("wandb did not end within %g s: what it had not taken is lost", GOODBYE)


class _Writer:
    """The thread's side: all that touches wandb, and the one place where its failures end."""

    def __init__(
        self,
        entries: "queue.Queue[Entry | None]",
        load: Callable[[], Any],
        run: Run,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._entries, self._load, self._run, self._decode = entries, load, run, decode
        self._complaints: set[str] = set()

    def serve(self) -> None:
        wandb = self._attempt("import", self._load)
        run = wandb and self._attempt("init", lambda: wandb.init(**asdict(self._run)))
        while (entry := self._entries.get()) is not None:
            if run is not None:
                table = self._attempt("table", partial(self._table, wandb, entry.rollouts))
                self._attempt("log", partial(run.log, {**entry.metrics, **(table or {})}, step=entry.step))
        if run is not None:
            self._attempt("finish", run.finish)

    def _table(self, wandb: Any, rollouts: list[Rollout]) -> dict[str, Any]:
        rows = [[self._decode(rollout.tokens), rollout.score] for rollout in rollouts]
        return {TABLE: wandb.Table(columns=["text", "score"], data=rows)} if rows else {}

    def _attempt(self, what: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as failure:  # noqa: BLE001 - whatever wandb does must not reach the environment
            if what not in self._complaints:
                log.warning("wandb (%s) fails, and the work goes on: %s: %s", what, type(failure).__name__, failure)
            self._complaints.add(what)
            return None


def _wandb() -> Any:
    return require("wandb", "wandb", purpose="use_wandb")
