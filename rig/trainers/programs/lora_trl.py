"""TRL trains LoRA adapters, stops, and resumes. Run in TRL's environment.

Notes what each weight sync was given: the names, and how it differs from the base weights with the adapters added.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from trl.experimental.async_grpo import AsyncGRPOTrainer  # type: ignore[import-not-found]

from rig.trainers.trl_on_cpu import prepare, settings
from stepwell.pool.client import DataPool, connect
from stepwell.trainers.transfers import Weights, stream_weights
from stepwell.trainers.trl import StepwellRolloutWorker, StepwellWeightTransfer
from stepwell.trainers.trl_callback import StepwellCallback, last_checkpoint

ASKED: dict[str, Any] = json.loads(sys.argv[1])
FOLDER, MODEL = Path(ASKED["folder"]), Path(ASKED["model"])
UPDATES = 3
"""Of each of the two runs."""
TOLD = ("logprobs_current", "temperatures_assumed", "ratio")
Tensors = dict[str, torch.Tensor]


class NotedSync:
    """In place of a WeightSync."""

    def __init__(self, pool: DataPool) -> None:
        self._pool = pool
        self.sent: list[Tensors] = []

    def sync(self, weights: Weights, version: int) -> None:
        self.sent.append({name: tensor.clone() for name, tensor in stream_weights(weights)})
        self._pool.set_policy_version(version)


def main() -> None:
    prepare()
    pool = connect("data_pool", address=ASKED["address"], namespace=ASKED["namespace"])
    base = load_file(MODEL / "model.safetensors")
    first, resumed = NotedSync(pool), NotedSync(pool)
    model, told = train(pool, first, UPDATES)
    still = {name.replace(".base_layer", ""): tensor for name, tensor in model.get_base_model().state_dict().items()}
    answer = {
        "names": sorted(first.sent[-1]),
        "expected_names": sorted(base),
        "learned": gap(first.sent[-1], base),
        "off_the_merged": gap(first.sent[-1], dict(stream_weights(model))),
        "off_the_base": gap(base, still),
    }
    train(pool, resumed, 2 * UPDATES)
    answer |= {"off_the_resumed": gap(resumed.sent[0], first.sent[-1]), "syncs": len(resumed.sent), "told": told}
    sys.stdout.write(f"{json.dumps(answer)}\n")


def train(pool: DataPool, sync: NotedSync, updates: int) -> tuple[Any, dict[str, list[float]]]:
    """The model, and what TRL's log says of data without log-probabilities and temperatures."""
    worker = StepwellRolloutWorker(pool, samples_ahead=4)
    trainer = AsyncGRPOTrainer(
        str(MODEL),
        args=settings(FOLDER, updates=updates, samples=4, save_steps=UPDATES, max_staleness=100),
        train_dataset=Dataset.from_dict({"prompt": ["the pool has the rollouts"]}),
        rollout_worker=worker,
        weight_transfer=StepwellWeightTransfer(sync, pool),
        callbacks=[StepwellCallback(worker)],
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(FOLDER))
    logged: list[dict[str, float]] = trainer.state.log_history
    told = {name: [line[name] for line in logged if name in line] for name in TOLD}
    return trainer.model, told


def gap(some: Tensors, others: Tensors) -> float:
    return max(float((tensor - others[name]).abs().max()) for name, tensor in some.items())


if __name__ == "__main__":
    main()
