"""TRL's AsyncGRPOTrainer takes the same updates from the pool and from memory, in turns. Runs in TRL's environment.

From memory, a rollout worker has all samples in TRL's queue before the training begins; they are of TRL's own class.
Times are TRL's own: `perf/step_s`, and `perf/rollout_wait_s`, in which it waits for its queue.
"""

import json
import pickle
import sys
import time
from pathlib import Path
from queue import Queue
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOTrainer  # type: ignore[import-not-found]
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # type: ignore[import-not-found]

from benchmarks.trainers_rig.recorded import PlainRow
from benchmarks.trainers_rig.timed_run import Round, TimedRun, tell
from rig.trainers.trl_on_cpu import prepare, settings
from stepwell.pool.client import connect
from stepwell.trainers.trl import StepwellRolloutWorker
from stepwell.trainers.trl_callback import StepwellCallback

NEVER = 1_000_000


class FromMemory:
    """TRL's Protocol of a rollout worker, for samples that are there."""

    def __init__(self, rows: list[PlainRow]) -> None:
        self.rollout_buffer: Queue[Any] = Queue()
        self.metrics_queue: Queue[Any] = Queue()
        for row in rows:
            self.rollout_buffer.put(_sample(row))

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    """Weights go to no engine."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def main() -> None:
    asked = json.loads(sys.argv[1])
    prepare()
    pool = connect(asked["pool"], address=asked["address"], namespace=asked["namespace"])
    rows: list[PlainRow] = pickle.loads(Path(asked["rows"]).read_bytes())
    rounds = []
    for channel in asked["channels"]:
        worker = StepwellRolloutWorker(pool, channel=channel, samples_ahead=asked["samples"])
        with_pool = train(asked, worker, [StepwellCallback(worker)])
        rounds.append(Round(with_pool, train(asked, FromMemory(rows), [])))
    tell(rounds)


def train(asked: dict[str, Any], worker: Any, callbacks: list[StepwellCallback]) -> TimedRun:
    updates, samples = asked["unmeasured"] + asked["updates"], asked["samples"]
    out = Path(asked["folder"], "trl")
    trainer = AsyncGRPOTrainer(
        asked["model"],
        args=settings(out, updates=updates, samples=samples, weight_sync_steps=NEVER, save_strategy="no"),
        train_dataset=Dataset.from_dict({"prompt": ["the rollouts are recorded"]}),
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
        callbacks=callbacks,
    )
    trainer.train()
    told = [logged for logged in trainer.state.log_history if "perf/rollout_wait_s" in logged]
    measured = told[asked["unmeasured"] :]
    assert len(measured) == asked["updates"], trainer.state.log_history
    return TimedRun(
        samples=asked["updates"] * samples,
        seconds=sum(logged["perf/step_s"] for logged in measured),
        waited=sum(logged["perf/rollout_wait_s"] for logged in measured),
        losses=[logged["loss"] for logged in told],
    )


def _sample(row: PlainRow) -> Any:
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=row.ids,
        completion_mask=row.trained.astype("int32"),
        old_log_probs=row.logprobs,
        advantage=row.advantage,
        model_version=0,
        group_id=row.group,
        metrics={},
        enqueued_at=time.time(),
    )


if __name__ == "__main__":
    main()
