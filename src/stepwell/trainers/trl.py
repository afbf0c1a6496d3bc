"""TRL's AsyncGRPOTrainer, fed by the pool and syncing through WeightSync.

    worker = StepwellRolloutWorker(pool)
    sync = WeightSync(engines, transfer=CheckpointTransfer(folder), pool=pool, probe=())
    transfer = StepwellWeightTransfer(sync, pool)
    AsyncGRPOTrainer(model, args=…, train_dataset=…, rollout_worker=worker, weight_transfer=transfer).train()

Both classes are what TRL asks for in its own Protocols (trl.experimental.async_grpo, 1.16); TRL itself is not imported.
What always holds: a group is acknowledged once TRL has taken the last of its samples; one of which it has taken none
when it stops is given back; no group is given to TRL twice. Rows are chosen as by the reference trainer
(trainers/rows.py): groups in which all earned the same never reach TRL, but count for the `reward` in its log.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Full, Queue
from threading import Event
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from stepwell.errors import FetchTimeout, LeaseExpired
from stepwell.steps.step import FloatArray, IntArray
from stepwell.trainers.checkpoint import TrainedLedger
from stepwell.trainers.ports import TrainingBatch, TrainingPool
from stepwell.trainers.rows import TrainedRows, choose_rows

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

PATIENCE = 2.0
"""Seconds of waiting, for a group or for room in the buffer, after which the worker looks whether it is to stop."""
Message: TypeAlias = dict[str, str]
Rate: TypeAlias = tuple[float, float]
"""What TRL logs as a sum over a count."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RolloutSample:
    """One row, with the attributes of TRL's class of that name; the three arrays have one entry a token."""

    input_ids: IntArray
    completion_mask: IntArray
    """1 on the tokens that are trained."""
    old_log_probs: FloatArray
    advantage: float
    model_version: int
    """TRL's number of the weights that wrote the group's oldest token: TRL drops by it, so a group goes as a whole."""
    group_id: int
    enqueued_at: float
    prompt: tuple[Message, ...] = ()
    """What TRL shows of a sample, as messages; the pool keeps tokens."""
    completion: tuple[Message, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Stays empty: what is logged counts rollouts, not samples."""


def samples_of(rows: TrainedRows, group_id: int, version_offset: int) -> list[RolloutSample]:
    """A sample for each row that is trained. `version_offset` is how far the pool's versions are ahead of TRL's."""
    merged, now = rows.merged, time.time()
    if not rows.tokens:
        return []
    oldest = int(merged.versions[rows.trained].min())
    samples = []
    for row in np.sort(rows.chosen_R).tolist():
        here = slice(merged.offsets_R[row], merged.offsets_R[row + 1])
        samples.append(
            RolloutSample(
                input_ids=merged.tokens[here],
                completion_mask=rows.trained[here].astype(np.int32),
                old_log_probs=merged.logprobs[here],
                advantage=float(rows.advantages_T[merged.trajectory_of_R[row]]),
                model_version=oldest - version_offset,
                group_id=group_id,
                enqueued_at=now,
            )
        )
    return samples


class Delivered:
    """Groups that were put where TRL takes them, the oldest first, with the numbers of their samples."""

    def __init__(self) -> None:
        self._groups: deque[tuple[range, TrainingBatch]] = deque()
        self._samples = 0

    def add(self, batch: TrainingBatch, samples: int) -> None:
        self._groups.append((range(self._samples, self._samples + samples), batch))
        self._samples += samples

    def finished(self, taken: int) -> list[TrainingBatch]:
        """Those of which the last sample is taken, once so many are in all; they leave."""
        done = []
        while self._groups and self._groups[0][0].stop <= taken:
            done.append(self._groups.popleft()[1])
        return done

    def begun(self, taken: int) -> list[TrainingBatch]:
        """Those of which some sample is taken, and others not."""
        return [batch for samples, batch in self._groups if samples.start < taken < samples.stop]

    def untouched(self, taken: int) -> list[TrainingBatch]:
        return [batch for samples, batch in self._groups if samples.start >= taken]


class StepwellRolloutWorker:
    """Takes groups from the pool, in a thread of its own, and puts their samples where TRL takes them.

    At most `samples_ahead` wait there: about as many as an update takes, for what waits grows old. A group that is not
    taken within `lease` seconds goes back to the pool, and is passed over when it comes again.
    """

    def __init__(
        self, pool: TrainingPool, *, channel: str = "train", samples_ahead: int = 128, lease: float = 600.0
    ) -> None:
        self.rollout_buffer: Queue[RolloutSample] = Queue(samples_ahead)
        self.metrics_queue: Queue[dict[str, Rate]] = Queue()
        self._pool = pool
        self._channel = channel
        self._lease = lease
        self._version_offset = 0
        self._known = TrainedLedger()
        self._delivered = Delivered()
        self._groups = 0
        self._samples = 0
        self._missing = ""
        self._is_stopping = Event()
        self._running: Future[None] | None = None

    # -- what TRL calls ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="stepwell-trl")
        self._running = thread.submit(self._run)
        thread.shutdown(wait=False)

    def stop(self) -> None:
        """Returns once every group is acknowledged or given back."""
        self._is_stopping.set()
        if self._running is not None and (failure := self._running.exception()) is not None:
            log.error("groups may come back that TRL has taken: %s", failure)

    def update_model_version(self, model_version: int) -> None:
        self._version_offset = self._pool.stats().policy_version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the worker. One that waits for agents is healthy, for however long."""
        if self._running is not None and self._running.done():
            self._running.result()
        if self._missing:
            log.info("TRL waits: %s", self._missing)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._deliver_a_group()
        finally:
            self._settle()
            self._acknowledge(self._delivered.begun(self._taken))
            for batch in self._delivered.untouched(self._taken):
                self._pool.nack(batch)

    def _deliver_a_group(self) -> None:
        batch = self._fetch()
        if batch is not None:
            rows = choose_rows(batch, self._known)
            samples = samples_of(rows, self._groups, self._version_offset)
            self._groups += 1
            self._delivered.add(batch, len(samples))
            self._note(batch, rows)
            for sample in samples:
                self._put(sample)
        self._settle()

    def _fetch(self) -> TrainingBatch | None:
        try:
            batch = self._pool.fetch_batch(1, timeout=PATIENCE, lease=self._lease, channel=self._channel)
        except FetchTimeout as missing:
            self._missing = str(missing)
            return None
        self._missing = ""
        return batch

    def _put(self, sample: RolloutSample) -> None:
        while not self._is_stopping.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=PATIENCE)
            except Full:
                self._settle()
            else:
                self._samples += 1
                return

    def _note(self, batch: TrainingBatch, rows: TrainedRows) -> None:
        rewards = batch.rewards_T[rows.is_new_T & ~np.isnan(batch.rewards_T)]
        if len(rewards):
            self.metrics_queue.put({"reward": (float(rewards.sum()), float(len(rewards)))})
        self._known.add((), rows.uids)
        self._known.mark_acknowledged()

    # -- what was taken ------------------------------------------------------------------------------------------------

    @property
    def _taken(self) -> int:
        """Samples that TRL has taken, in all."""
        return self._samples - self.rollout_buffer.qsize()

    def _settle(self) -> None:
        self._acknowledge(self._delivered.finished(self._taken))

    def _acknowledge(self, batches: Iterable[TrainingBatch]) -> None:
        for batch in batches:
            try:
                self._pool.ack(batch)
            except LeaseExpired:
                log.warning("a lease ran out before TRL had taken its group; it comes back and is passed over")


class StateSync(Protocol):
    """`stepwell.trainers.weight_sync.WeightSync`."""

    def sync(self, weights: "Mapping[str, torch.Tensor]", version: int) -> object: ...


class StepwellWeightTransfer:
    """Brings TRL's weights to the engines, each time as the pool's next version, which `sync` tells the pool.

    `WeightSync` pauses and resumes the engines itself, for no longer than they need; TRL need not. TRL hands out names
    and tensors, not a model to compare an engine with, hence `probe=()`: watch `kl` in its log, which is near 0 where
    the engines compute with the trainer's weights.
    """

    def __init__(self, sync: StateSync, pool: TrainingPool) -> None:
        self._sync = sync
        self._pool = pool

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: "Iterable[tuple[str, torch.Tensor]]") -> None:
        self._sync.sync(dict(iterator), self._pool.stats().policy_version + 1)

    def resume(self) -> None: ...

    def destroy(self) -> None: ...
