"""A batch from the pool goes through verl's DataProto, and through its GRPO. Run in verl's environment."""

import json
import sys

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from stepwell.pool.client import connect
from stepwell.steps.advantages import group_advantages
from stepwell.trainers.verl import to_data_proto

VERLS_EPSILON = 1e-6


def main() -> None:
    asked = json.loads(sys.argv[1])
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
        answer = {
            "keys": sorted(chosen.batch.keys()),
            "rows": len(data),
            "parts": [len(part) for part in parts],
            "gap": (theirs - expected).abs().max().item(),
            "gap_of_tensor": (theirs - data.batch["advantages"]).abs().max().item(),
            "advantages": sorted({round(float(value), 3) for value in in_rows}),
            "unscored": data.meta_info["unscored_rollouts"],
        }
    sys.stdout.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
