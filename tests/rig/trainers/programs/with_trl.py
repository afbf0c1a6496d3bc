"""TRL's AsyncGRPOTrainer trains on what the pool has, and syncs into vLLM. Run in TRL's environment."""

import json
import sys
from dataclasses import fields
from pathlib import Path

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer  # type: ignore[import-not-found]
from trl.experimental.async_grpo import async_rollout_worker as theirs

from stepwell.pool.client import connect
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.trl import StepwellRolloutWorker, StepwellWeightTransfer
from stepwell.trainers.trl_callback import StepwellCallback
from stepwell.trainers.trl_samples import RolloutSample
from stepwell.trainers.weight_sync import WeightSync
from tests.rig.trainers.trl_on_cpu import prepare, settings

SAMPLES = 128
"""An update."""


def main() -> None:
    asked = json.loads(sys.argv[1])
    prepare()
    folder, model = Path(asked["folder"]), Path(asked["model"])
    pool = connect(asked["pool"], address=asked["address"], namespace=asked["namespace"])
    sync = WeightSync(
        [asked["engine"]], transfer=CheckpointTransfer(folder / "weights", like=model), pool=pool, probe=()
    )
    worker = StepwellRolloutWorker(pool, samples_ahead=SAMPLES)
    trainer = AsyncGRPOTrainer(
        str(model),
        args=settings(folder / "trl", updates=asked["updates"], samples=SAMPLES, save_strategy="no"),
        train_dataset=Dataset.from_dict({"prompt": ["the agents have their own"]}),
        rollout_worker=worker,
        weight_transfer=StepwellWeightTransfer(sync, pool),
        callbacks=[StepwellCallback(worker)],
    )
    trainer.train()
    trainer.save_model(asked["trained"])
    told = [logged for logged in trainer.state.log_history if "reward" in logged and "kl" in logged]
    answer = {
        "updates": trainer.state.global_step,
        "rewards": [logged["reward"] for logged in told],
        "kls": [logged["kl"] for logged in told],
        "staleness": max(logged["sample/staleness_max"] for logged in told),
        "version": pool.stats().policy_version,
        "missing": missing(),
    }
    sys.stdout.write(f"{json.dumps(answer)}\n")


def missing() -> list[str]:
    """What TRL asks for and we do not have."""
    asked = {
        StepwellRolloutWorker: async_grpo_trainer.RolloutWorkerProtocol,
        StepwellWeightTransfer: async_grpo_trainer.WeightTransferProtocol,
    }
    calls = {name for ours, protocol in asked.items() for name in vars(protocol).keys() - vars(ours).keys()}
    attributes = {field.name for field in fields(theirs.RolloutSample)} - set(dir(RolloutSample))
    return sorted(name for name in calls | attributes if not name.startswith("_"))


if __name__ == "__main__":
    main()
