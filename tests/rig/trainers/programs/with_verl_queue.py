"""A batch from the pool goes through verl's TransferQueue, and through its advantages of several rows a rollout. Run in
verl's environment; nothing is trained."""

import json
import sys

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from stepwell.trainers.verl import plugin
from stepwell.trainers.verl.pool_sampler import PoolSampler

QUEUE = {
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": 1000, "num_data_storage_units": 1},
    }
}
OURS = {"_feed", "_checkpoint", "_rows_together", "_sync_weights", "_probe_logprobs"}
"""Methods of the trainer mode that verl does not know; all others replace or extend one of verl's."""


def main() -> None:
    asked = json.loads(sys.argv[1])
    ray.init(address=asked["address"], log_to_driver=False, runtime_env={"py_executable": sys.executable})
    tq.init(OmegaConf.create(QUEUE))
    try:
        answer = pass_through(asked)
    finally:
        tq.close()
    sys.stdout.write(f"{json.dumps(answer)}\n")


def pass_through(asked: dict[str, str]) -> dict[str, object]:
    sampler = PoolSampler(
        trainer_mode="stepwell",
        trainer_config={"pool": asked["pool"], "namespace": asked["namespace"], "weights": "unused"},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        refill_fn=None,
    )
    batch, metrics = sampler.sample(global_steps=5, partition_id="train", batch_size=int(asked["groups"]))
    stored = tq.kv_batch_get(keys=batch.keys, partition_id="train")
    ours = torch.nested.as_nested_tensor(sampler.advantages(batch.keys), layout=torch.jagged).to_padded_tensor(0.0)
    data = DataProto(batch=stored.select("response_mask", "rm_scores").to_padded_tensor())
    data.non_tensor_batch["uid"] = np.array(list(stored["uid"]), dtype=object)
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    theirs = compute_advantage_for_multi_trajectories(data, batch_keys=batch.keys, adv_estimator="grpo")
    of_classes = {name for name in vars(plugin.PoolTrainer) if callable(getattr(plugin.PoolTrainer, name))}
    return {
        "rows": len(batch.keys),
        "rollouts": len({key.rsplit("_", 1)[0] for key in batch.keys}),
        "gap": (theirs.batch["advantages"] - ours).abs().max().item(),
        "versions": sorted({tag["max_global_steps"] for tag in batch.tags}),
        "ids": [ids.tolist() for ids in stored["input_ids"].unbind()],
        "prompts": [len(ids) for ids in stored["prompts"].unbind()],
        "reward": metrics["stepwell/reward"],
        "is_known": get_trainer_cls("stepwell") is plugin.PoolTrainer,
        "missing": sorted(name for name in of_classes - OURS if not hasattr(PPOTrainer, name)),
    }


if __name__ == "__main__":
    main()
