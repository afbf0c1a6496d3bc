"""TRL's AsyncGRPOTrainer with batches from the pool and weight sync through WeightSync.

    worker = StepwellRolloutWorker(pool)
    sync = WeightSync(engines, transfer=CheckpointTransfer(folder), pool=pool, probe=())
    trainer = AsyncGRPOTrainer(
        model,
        args=…,
        train_dataset=…,
        rollout_worker=worker,
        weight_transfer=StepwellWeightTransfer(sync, pool),
        callbacks=[StepwellCallback(worker)],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(…))

Both classes implement TRL's own Protocols (trl.experimental.async_grpo, 1.16); TRL itself is not imported.
StepwellCallback and last_checkpoint are in trl_callback.py.

- A group is acknowledged when a checkpoint that contains it is on disk; without checkpoints, when it is trained. What
  is not acknowledged returns to the pool at the end (trl_progress.py).
- No group is given to TRL twice.
- A group is dropped as stale as a whole or not at all (trl_samples.py).
- Rows are chosen as in the reference trainer (trainers/rows.py): groups with equal returns never reach TRL, but count
  in the `reward` of its log. Too many in a row end the training with NothingLearned.
- TRL divides all logits by one temperature, so only what was sampled at that one reaches it.
- TRL has one advantage per sample: a row with several (other settings of `advantage`, `credit`) becomes several.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Full, Queue
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from stepwell.errors import BadRequest, FetchTimeout
from stepwell.pool.client import DataPool
from stepwell.steps.advantages import AdvantageKind, BaselineKind
from stepwell.steps.credit import CreditKind
from stepwell.trainers.feed import Feed
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.rows import TrainedRows
from stepwell.trainers.settings import FeedSettings, OldLogprobs, choose_old_logprobs
from stepwell.trainers.transfers import Weights
from stepwell.trainers.trl_groups import (
    DeliveredGroup,
    GroupStaleness,
    PolicyVersions,
    RolloutSample,
    SampleNumber,
    TrlProgress,
    row_samples,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

POLL_INTERVAL = 2.0
"""Seconds to wait for a group, or for room in the buffer, before the worker checks whether it must stop."""
SAID_EVERY = 60.0
"""Seconds without a group after which the log says what is missing, and between two such lines."""
Rate: TypeAlias = tuple[float, float]
"""A sum and a count, whose quotient TRL logs."""


def samples_of(rows: TrainedRows, group: int, versions: PolicyVersions) -> list[RolloutSample]:
    """One sample per trained row and advantage in it, up to the last token with that advantage."""
    if not rows.tokens:
        return []
    staleness, now = GroupStaleness(int(rows.merged.versions[rows.trained].min()), versions), time.time()
    return [
        RolloutSample(
            input_ids=sample.tokens,
            completion_mask=sample.trained.astype(np.int32),
            old_log_probs=sample.logprobs,
            advantage=sample.advantage,
            group_id=SampleNumber(group, place),
            staleness=staleness,
            enqueued_at=now,
        )
        for place, sample in enumerate(row_samples(rows))
    ]


class StepwellRolloutWorker:
    """Fetches groups from the pool in its own thread, and puts their samples into TRL's buffer.

    It needs a StepwellCallback, which tells it what TRL has trained. At most `samples_ahead` samples wait in the
    buffer: about one update's worth, because waiting samples become stale. Groups are fetched by about half as many
    samples at a time, as far as they are ready. A group whose lease ends because the pool
    had no sign of this process for `lease` seconds is skipped when it comes again. `temperature` is
    that of TRL's configuration; steps of another one are left out. Steps that do not tell theirs are taken for sampled
    at `assumed_temperature`, or left out if that is None. `old_logprobs` is `current`, or `recorded`, by which rollouts
    that lack log-probabilities are left out. `advantage`, `credit` and the baselines are as in Settings; the worker
    takes one group at a time, so the baseline `batch` compares within it. After `max_unlearnable` groups in a row
    from which nothing can be learned, the training ends with NothingLearned.
    """

    def __init__(
        self,
        pool: DataPool,
        *,
        channel: str = "train",
        samples_ahead: int = 128,
        lease: float = 600.0,
        temperature: float = 1.0,
        assumed_temperature: float | None = 1.0,
        old_logprobs: OldLogprobs | None = None,
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
        settings = FeedSettings(
            channel=channel,
            fetch_timeout=POLL_INTERVAL,
            lease=lease,
            max_unlearnable=max_unlearnable,
            advantage=advantage,
            credit=credit,
            baseline=baseline,
            fallback_baseline=fallback_baseline,
            divide_by_std=divide_by_std,
            temperature=temperature,
            assumed_temperature=assumed_temperature,
            old_logprobs=old_logprobs,
        )
        self._settings = choose_old_logprobs(
            settings, ("current", "recorded"), "TRL's loss knows no other weights than those that it trains"
        )
        self._feed = Feed(pool, self._settings, "groups")
        self.progress = TrlProgress(self._feed)
        self._versions = PolicyVersions()
        self._begun: list[RolloutSample] = []
        """Samples of a checkpoint, which TRL gets first."""
        self._group_samples = samples_ahead
        """How many samples the last group had that had any."""
        self._groups = 0
        self._missing = ""
        self._last_word = time.monotonic()
        """When a group came, or the log said what is missing."""
        self._is_ready = False
        self._is_stopping = Event()
        self._running: Future[None] | None = None

    # -- called by TRL -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if not self._is_ready:
            raise BadRequest("pass callbacks=[StepwellCallback(worker)] to AsyncGRPOTrainer: it says what is trained")
        thread = ThreadPoolExecutor(1, thread_name_prefix="stepwell-trl")
        self._running = thread.submit(self._run)
        thread.shutdown(wait=False)

    def stop(self) -> None:
        """Returns when every group is acknowledged or returned to the pool."""
        self._is_stopping.set()
        if self._running is not None and (failure := self._running.exception()) is not None:
            log.error("the worker had ended: %s", failure)
        self.progress.close()

    def update_model_version(self, model_version: int) -> None:
        self._versions.trl, self._versions.pool = model_version, self._pool.stats().policy_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises the exception that ended the worker. A worker that only waits for agents is healthy."""
        if self._running is not None and self._running.done():
            self._running.result()
        if self._missing and time.monotonic() - self._last_word >= SAID_EVERY:
            self._last_word = time.monotonic()
            log.warning("TRL waits: %s", self._missing)

    # -- called by StepwellCallback ------------------------------------------------------------------------------------

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the state in a checkpoint, or begin without one. Comes before `start`."""
        if state is not None:
            self._begun = self.progress.restore(state, self._versions)
            self._groups = 1  # the begun one has the first number
        self._is_ready = True

    def commit(self) -> None:
        """Acknowledges what is trained, so that it is kept."""
        self.progress.commit()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._put(self._begun)
        while not self._is_stopping.is_set():
            if not self._feed.leased:
                self._fetch()
            if self._feed.leased:
                self._deliver()

    def _deliver(self) -> None:
        chosen = self._feed.choose()
        samples = samples_of(chosen.rows, self._groups, self._versions)
        self.progress.add(self._groups, DeliveredGroup(rollouts=chosen.rollouts, samples=samples))
        self._groups += 1
        self._group_samples = len(samples) or self._group_samples
        self._note(chosen.batch, chosen.rows)
        self._put(samples)
        self._feed.monitor.check(chosen.rows, self._versions.pool)

    def _fetch(self) -> None:
        several, settings = self.rollout_buffer.maxsize // (2 * self._group_samples), self._settings
        if several > 1:
            ready = self._pool.fetch_ready(several, lease=settings.lease, channel=settings.channel)
            self._feed.leased.extend(ready)
        if not self._feed.leased:
            try:
                self._feed.fetch(1)
            except FetchTimeout as missing:
                self._missing = str(missing)
                return
        self._missing, self._last_word = "", time.monotonic()

    def _put(self, samples: Iterable[RolloutSample]) -> None:
        for sample in tuple(samples):
            while not self._is_stopping.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=POLL_INTERVAL)
                except Full:
                    continue
                break

    def _note(self, batch: TrainingBatch, rows: TrainedRows) -> None:
        if not rows.is_new_T.any():  # the batch is one group, which is new or not
            return
        returns = batch.whole_groups().returns_T
        returns = returns[~np.isnan(returns)]
        counts = rows.left_out
        left_out = counts.steps_other_temperature + counts.steps_unknown_temperature + counts.steps_unusable_advantages
        rates: dict[str, Rate] = {
            "unlearnable_groups": (float(rows.tokens == 0), 1.0),
            "steps_left_out": (float(left_out), float(len(batch.columns))),
            "rollouts_without_logprobs": (float(counts.rollouts_without_logprobs), 1.0),
        }
        filled = rows.filled_in(self._versions.pool)
        if rows.tokens:
            rates["logprobs_current"] = (float(filled.logprobs_current), float(rows.tokens))
        if filled.logprobs_current:
            rates["logprobs_staleness"] = (filled.logprobs_staleness, 1.0)
        if filled.temperatures_assumed:
            rates["temperatures_assumed"] = (float(filled.temperatures_assumed), float(len(batch.columns)))
        if len(returns):
            rates["reward"] = (float(returns.sum()), float(len(returns)))
        self.metrics_queue.put(rates)


class StateSync(Protocol):
    """`stepwell.trainers.weight_sync.WeightSync`."""

    def sync(self, weights: Weights, version: int) -> object: ...


class StepwellWeightTransfer:
    """Brings TRL's weights to the engines, each time as the pool's next version; `sync` sets it in the pool.

    `WeightSync` pauses and resumes the engines itself. TRL passes names and tensors, and no model to compare an engine
    with, hence `probe=()`: the checksums show that the engines hold the weights. Watch `kl` in TRL's log too, which is
    near 0 if they also compute with them.
    """

    def __init__(self, sync: StateSync, pool: DataPool) -> None:
        self._sync = sync
        self._pool = pool

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: "Iterable[tuple[str, torch.Tensor]]") -> None:
        self._sync.sync(iterator, self._pool.stats().policy_version + 1)

    def resume(self) -> None: ...

    def destroy(self) -> None: ...
