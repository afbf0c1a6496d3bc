"""TRL's AsyncGRPOTrainer with batches from the pool and weight sync through WeightSync.

    worker = StepwellRolloutWorker(pool)
    sync = WeightSync(engines, transfer=CheckpointTransfer(folder), pool=pool, probe=())
    transfer = StepwellWeightTransfer(sync, pool)
    AsyncGRPOTrainer(model, args=…, train_dataset=…, rollout_worker=worker, weight_transfer=transfer).train()

Both classes implement TRL's own Protocols (trl.experimental.async_grpo, 1.16); TRL itself is not imported.

- A group is acknowledged when TRL has taken its last sample; a group without taken samples is returned at the end.
- No group is given to TRL twice.
- Rows are chosen as in the reference trainer (trainers/rows.py): groups with equal returns never reach TRL, but count
  in the `reward` of its log. Too many in a row end the training with NothingLearned.
- TRL divides all logits by one temperature, so only what was sampled at that one reaches it.
- TRL has one advantage per sample: a row with several (other settings of `advantage`, `credit`) becomes several.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Full, Queue
from threading import Event
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from stepwell.errors import FetchTimeout
from stepwell.steps.advantages import AdvantageKind
from stepwell.steps.baselines import BaselineKind
from stepwell.steps.credit import CreditKind
from stepwell.steps.running_statistics import NO_PAST
from stepwell.steps.step import FloatArray, IntArray
from stepwell.trainers.checkpoint import TrainedLedger
from stepwell.trainers.learnable import LearningMonitor
from stepwell.trainers.ports import TrainingBatch, TrainingPool
from stepwell.trainers.row_samples import row_samples
from stepwell.trainers.rows import TrainedRows, choose_rows
from stepwell.trainers.settings import RowSettings
from stepwell.trainers.weight_stream import Weights

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

POLL_INTERVAL = 2.0
"""Seconds to wait for a group, or for room in the buffer, before the worker checks whether it must stop."""
Message: TypeAlias = dict[str, str]
Rate: TypeAlias = tuple[float, float]
"""A sum and a count, whose quotient TRL logs."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RolloutSample:
    """One row, with the attributes of TRL's class of the same name; the three arrays have one entry per token."""

    input_ids: IntArray
    completion_mask: IntArray
    """1 for trained tokens."""
    old_log_probs: FloatArray
    advantage: float
    model_version: int
    """TRL's version of the weights that sampled the group's oldest token, so TRL drops a stale group as a whole."""
    group_id: int
    enqueued_at: float
    prompt: tuple[Message, ...] = ()
    """Messages that TRL displays; empty, because the pool stores tokens."""
    completion: tuple[Message, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Always empty: the logged metrics count rollouts, not samples."""


def samples_of(rows: TrainedRows, group_id: int, version_offset: int) -> list[RolloutSample]:
    """One sample per trained row and advantage in it, up to the last token with that advantage.

    `version_offset` is the pool's version minus TRL's.
    """
    if not rows.tokens:
        return []
    oldest, now = int(rows.merged.versions[rows.trained].min()), time.time()
    return [
        RolloutSample(
            input_ids=sample.tokens,
            completion_mask=sample.trained.astype(np.int32),
            old_log_probs=sample.logprobs,
            advantage=sample.advantage,
            model_version=oldest - version_offset,
            group_id=group_id,
            enqueued_at=now,
        )
        for sample in row_samples(rows)
    ]


class StepwellRolloutWorker:
    """Fetches groups from the pool in its own thread, and puts their samples into TRL's buffer.

    At most `samples_ahead` samples wait there: about one update's worth, because waiting samples become stale. A group
    that is not taken within `lease` seconds returns to the pool, and is skipped when it comes again. `temperature` is
    that of TRL's configuration; steps of another one are left out, and so are steps that do not tell theirs, unless
    `assumed_temperature` is set. `advantage`, `credit` and the baselines are as in Settings; the worker takes one group
    at a time, so the baseline `batch` compares within it. After `max_unlearnable` groups in a row
    from which nothing can be learned, the training ends with NothingLearned.
    """

    def __init__(
        self,
        pool: TrainingPool,
        *,
        channel: str = "train",
        samples_ahead: int = 128,
        lease: float = 600.0,
        temperature: float = 1.0,
        assumed_temperature: float | None = None,
        advantage: AdvantageKind = "rollout",
        credit: CreditKind = "root",
        baseline: BaselineKind = "group",
        fallback_baseline: BaselineKind = "running",
        divide_by_std: bool = True,
        max_unlearnable: int | None = 320,
    ) -> None:
        self.rollout_buffer: Queue[RolloutSample] = Queue(samples_ahead)
        self.metrics_queue: Queue[dict[str, Rate]] = Queue()
        self._pool = pool
        self._channel = channel
        self._lease = lease
        self._rows = RowSettings(
            advantage=advantage,
            credit=credit,
            baseline=baseline,
            fallback_baseline=fallback_baseline,
            divide_by_std=divide_by_std,
            temperature=temperature,
            assumed_temperature=assumed_temperature,
        )
        self._monitor = LearningMonitor(max_unlearnable, "groups")
        self._version_offset = 0
        self._known = TrainedLedger()
        self._past = NO_PAST
        self._delivered: deque[tuple[range, TrainingBatch]] = deque()
        """The groups in TRL's buffer, the oldest first, with the numbers of their samples."""
        self._groups = 0
        self._samples = 0
        self._missing = ""
        self._is_stopping = Event()
        self._running: Future[None] | None = None

    # -- called by TRL ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="stepwell-trl")
        self._running = thread.submit(self._run)
        thread.shutdown(wait=False)

    def stop(self) -> None:
        """Returns when every group is acknowledged or returned to the pool."""
        self._is_stopping.set()
        if self._running is not None and (failure := self._running.exception()) is not None:
            log.error("groups that TRL has taken may come back: %s", failure)

    def update_model_version(self, model_version: int) -> None:
        self._version_offset = self._pool.stats().policy_version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises the exception that ended the worker. A worker that only waits for agents is healthy."""
        if self._running is not None and self._running.done():
            self._running.result()
        if self._missing:
            log.info("TRL waits: %s", self._missing)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._deliver_group()
        finally:
            self._settle()
            taken = self._taken
            for samples, batch in self._delivered:
                if samples.start < taken:
                    self._acknowledge(batch)
                else:
                    self._pool.nack(batch)

    def _deliver_group(self) -> None:
        batch = self._fetch()
        if batch is None:
            self._settle()
            return
        rows = choose_rows(batch, self._known, self._rows, self._past)
        self._past = rows.statistics
        samples = samples_of(rows, self._groups, self._version_offset)
        self._groups += 1
        self._delivered.append((range(self._samples, self._samples + len(samples)), batch))
        self._note(batch, rows)
        for sample in samples:
            self._put(sample)
        self._settle()
        self._monitor.check(rows)

    def _fetch(self) -> TrainingBatch | None:
        try:
            batch = self._pool.fetch_batch(1, timeout=POLL_INTERVAL, lease=self._lease, channel=self._channel)
        except FetchTimeout as missing:
            self._missing = str(missing)
            return None
        self._missing = ""
        return batch

    def _put(self, sample: RolloutSample) -> None:
        while not self._is_stopping.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=POLL_INTERVAL)
            except Full:
                self._settle()
            else:
                self._samples += 1
                return

    def _note(self, batch: TrainingBatch, rows: TrainedRows) -> None:
        whole = batch.whole_groups()
        is_new = np.isin(whole.group_of_T, batch.group_of_T[rows.is_new_T])
        returns = whole.returns_T[is_new & ~np.isnan(whole.returns_T)]
        counts = rows.left_out
        left_out = counts.steps_other_temperature + counts.steps_unknown_temperature + counts.steps_unusable_advantages
        if rows.is_new_T.any():
            rates: dict[str, Rate] = {
                "unlearnable_groups": (float(rows.tokens == 0), 1.0),
                "steps_left_out": (float(left_out), float(len(batch.columns))),
            }
            if len(returns):
                rates["reward"] = (float(returns.sum()), float(len(returns)))
            self.metrics_queue.put(rates)
        self._known.add((), rows.uids)

    # -- taken samples -------------------------------------------------------------------------------------------------

    @property
    def _taken(self) -> int:
        """Number of samples that TRL has taken."""
        return self._samples - self.rollout_buffer.qsize()

    def _settle(self) -> None:
        """Acknowledge the groups whose last sample is taken."""
        taken = self._taken
        while self._delivered and self._delivered[0][0].stop <= taken:
            self._acknowledge(self._delivered.popleft()[1])

    def _acknowledge(self, batch: TrainingBatch) -> None:
        self._known.add(batch.leases, ())
        self._known.acknowledge(self._pool)


class StateSync(Protocol):
    """`stepwell.trainers.weight_sync.WeightSync`."""

    def sync(self, weights: Weights, version: int) -> object: ...


class StepwellWeightTransfer:
    """Brings TRL's weights to the engines, each time as the pool's next version; `sync` sets it in the pool.

    `WeightSync` pauses and resumes the engines itself. TRL passes names and tensors, and no model to compare an engine
    with, hence `probe=()`: the checksums show that the engines hold the weights. Watch `kl` in TRL's log too, which is
    near 0 if they also compute with them.
    """

    def __init__(self, sync: StateSync, pool: TrainingPool) -> None:
        self._sync = sync
        self._pool = pool

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: "Iterable[tuple[str, torch.Tensor]]") -> None:
        self._sync.sync(iterator, self._pool.stats().policy_version + 1)

    def resume(self) -> None: ...

    def destroy(self) -> None: ...
