"""One batch goes through verl's DataProto and its GRPO, another one through its TransferQueue and its advantages.

Run in verl's environment; nothing is trained."""

import json
import sys
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from stepwell.pool.client import connect
from stepwell.steps.advantages import group_advantages
from stepwell.trainers.verl import to_data_proto
from stepwell.trainers.verl import trainer_mode as plugin
from stepwell.trainers.verl.pool_sampler import PoolSampler

VERLS_EPSILON = 1e-6
QUEUE = {
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": 1000, "num_data_storage_units": 1},
    }
}
OURS = {
    *("_feed", "_checkpoint", "_rows_together", "_is_written"),
    *("_sync_weights", "_probe_logprobs", "_fill_logprobs"),
}
"""Methods of the trainer mode that verl does not know; all others replace or extend one of verl's."""


def main() -> None:
    asked = json.loads(sys.argv[1])
    ray.init(address=asked["address"], log_to_driver=False, runtime_env={"py_executable": sys.executable})
    answer = {"data_proto": through_data_proto(asked)}
    tq.init(OmegaConf.create(QUEUE))
    try:
        answer["queue"] = through_queue(asked)
    finally:
        tq.close()
    sys.stdout.write(f"{json.dumps(answer)}\n")


def through_data_proto(asked: dict[str, Any]) -> dict[str, object]:
    pool = connect(asked["pool"], address=asked["address"], namespace=asked["namespace"])
    with pool.batch(asked["groups"], timeout=60) as batch:
        data = to_data_proto(batch, prompt_length=16, response_length=16, pad_id=0, merged=True)
        parts = data.chunk(2)
        again = DataProto.concat(parts)
        for name, tensor in data.batch.items():
            assert torch.equal(again.batch[name], tensor), name
        for name, labels in data.non_tensor_batch.items():
            assert (again.non_tensor_batch[name] == labels).all(), name
        chosen = again.select(batch_keys=["token_level_rewards", "response_mask"], non_tensor_batch_keys=["uid"])
        theirs, _ = compute_grpo_outcome_advantage(
            token_level_rewards=chosen.batch["token_level_rewards"],
            response_mask=chosen.batch["response_mask"],
            index=chosen.non_tensor_batch["uid"],
        )
        ours = group_advantages(batch.rewards_T, batch.group_of_T, VERLS_EPSILON)
        rolled_out = dict(zip(dict.fromkeys(batch.columns.trajectory_uids), ours.tolist(), strict=True))
        in_rows = np.array([rolled_out[uid] for uid in again.non_tensor_batch["trajectory_uid"]])
        expected = torch.from_numpy(in_rows)[:, None] * chosen.batch["response_mask"]
        return {
            "keys": sorted(chosen.batch.keys()),
            "rows": len(data),
            "parts": [len(part) for part in parts],
            "gap": (theirs - expected).abs().max().item(),
            "gap_of_tensor": (theirs - data.batch["advantages"]).abs().max().item(),
            "advantages": sorted({round(float(value), 3) for value in in_rows}),
            "unscored": data.meta_info["unscored_rollouts"],
        }


def through_queue(asked: dict[str, Any]) -> dict[str, object]:
    sampler = PoolSampler(
        trainer_mode="stepwell",
        trainer_config={"pool": asked["queue_pool"], "namespace": asked["namespace"], "weights": "unused"},
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
        "is_written": {
            "advantages": torch.equal(stored["advantages"].to_padded_tensor(0.0), ours),
            "returns": torch.equal(stored["returns"].values(), stored["advantages"].values()),
            "old_log_probs": torch.equal(stored["old_log_probs"].values(), stored["rollout_log_probs"].values()),
        },
        "versions": sorted({tag["max_global_steps"] for tag in batch.tags}),
        "ids": [ids.tolist() for ids in stored["input_ids"].unbind()],
        "prompts": [len(ids) for ids in stored["prompts"].unbind()],
        "reward": metrics["stepwell/reward"],
        "is_known": get_trainer_cls("stepwell") is plugin.PoolTrainer,
        "missing": sorted(name for name in of_classes - OURS if not hasattr(PPOTrainer, name)),
    }


if __name__ == "__main__":
    main()
