"""Gradients of verl's own policy loss, for batches that went through its DataProto. Runs in verl's environment.

As in verl's bypass mode, the old log-probabilities are those of the rollout.
"""

import pickle
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import ActorConfig

from benchmarks.truth_rig.gradients import CLIP, PAD, Case, uphill
from benchmarks.truth_rig.policy import TreePolicy
from stepwell.trainers.verl import to_data_proto


def main() -> None:
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:])
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=CLIP,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
    )
    gradients = [gradient(case, config) for case in pickle.loads(asked.read_bytes())]
    torch.save({"version": version("verl"), "gradients": gradients}, answer)


def gradient(case: Case, config: Any) -> torch.Tensor:
    policy, length = TreePolicy(case.table), int(case.batch.columns.lengths_S.max())
    data = to_data_proto(
        case.batch,
        prompt_length=length,
        response_length=length,
        pad_id=PAD,
        merged=case.merged,
        temperature=case.temperature,
        advantage=case.advantage,
        credit=case.credit,
    )
    rows = data.batch
    logits = (
        policy(rows["input_ids"], rows["attention_mask"]).logits[:, length - 1 : -1] / data.meta_info["temperature"]
    )
    is_trained = rows["response_mask"].bool()
    in_vocabulary = rows["responses"].where(is_trained, 0)
    logprobs = logprobs_from_logits(logits, in_vocabulary)
    is_recorded = data.meta_info["rows_without_logprobs"] == 0
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=rows["rollout_log_probs"] if is_recorded else logprobs.detach(),
        log_prob=logprobs,
        advantages=rows["advantages"],
        response_mask=is_trained,
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    return uphill(policy)


if __name__ == "__main__":
    main()
