"""TRL's AsyncGRPOTrainer, killed at random moments and resumed, then run to its end. Run in TRL's environment.

Its model counts, beside its weights, how often it was trained on each rollout: who resumes resumes the count. A rollout
begins with its number, in two tokens.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOTrainer  # type: ignore[import-not-found]

from rig.trainers.lives import Lives
from rig.trainers.trl_on_cpu import prepare, settings
from stepwell.pool.client import DataPool, connect
from stepwell.trainers.transfers import Weights, stream_weights
from stepwell.trainers.trl import StepwellRolloutWorker, StepwellWeightTransfer
from stepwell.trainers.trl_callback import StepwellCallback, last_checkpoint

ASKED: dict[str, Any] = json.loads(sys.argv[1])
FOLDER = Path(ASKED["folder"])
DIGIT = 16
"""A rollout's number is DIGIT times its first token, plus its second."""


class PoolVersions:
    """In place of a WeightSync: reads all weights, and tells the pool their version."""

    def __init__(self, pool: DataPool) -> None:
        self._pool = pool

    def sync(self, weights: Weights, version: int) -> None:
        for _ in stream_weights(weights):
            pass
        self._pool.set_policy_version(version)


def main() -> None:
    lives = Lives(train, seed=ASKED["seed"])
    lives.kill(ASKED["kills"])
    code = lives.run()
    assert code == 0, f"the last life ended with {code}"
    sys.stdout.write(f"{json.dumps({'checkpoint': last_checkpoint(FOLDER), 'moments': lives.moments})}\n")


def train(passes: Callable[[], None]) -> None:
    prepare()
    pool = connect("data_pool", address=ASKED["address"], namespace=ASKED["namespace"])
    worker = StepwellRolloutWorker(pool, samples_ahead=4)
    trainer = AsyncGRPOTrainer(
        ASKED["model"],
        args=settings(
            FOLDER,
            updates=ASKED["updates"],
            samples=ASKED["samples"],
            micro_batches=ASKED["micro_batches"],
            max_staleness=ASKED["max_staleness"],
            save_steps=1,
            save_total_limit=2,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["the pool has the rollouts"]}),
        rollout_worker=worker,
        weight_transfer=StepwellWeightTransfer(PoolVersions(pool), pool),
        callbacks=[StepwellCallback(worker)],
    )
    count_rollouts(trainer.model, passes)
    trainer.train(resume_from_checkpoint=last_checkpoint(FOLDER))


def count_rollouts(model: torch.nn.Module, passes: Callable[[], None]) -> None:
    counts = torch.zeros(ASKED["rollouts"])
    model.register_buffer("counts", counts)

    def count(_: torch.nn.Module, args: tuple[Any, ...], named: dict[str, torch.Tensor]) -> None:
        ids, starts = named["input_ids"][0], (named["position_ids"][0] == 0).nonzero()[:, 0]
        numbers = DIGIT * ids[starts] + ids[starts + 1]
        counts.index_add_(0, numbers, torch.ones(len(numbers)))
        passes()

    model.register_forward_pre_hook(count, with_kwargs=True)


if __name__ == "__main__":
    main()
