"""TRL's AsyncGRPOTrainer trains on what the pool has, and syncs into vLLM. Run in TRL's environment.

TRL is made for GPUs. On a CPU two of its functions are replaced, before it is constructed: the one that asks CUDA for
the device's name, and attention, for which it has a GPU's kernel only.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing  # type: ignore[import-not-found]
from trl.experimental.async_grpo import async_rollout_worker as theirs

from stepwell.pool.client import connect
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.trl import RolloutSample, StepwellRolloutWorker, StepwellWeightTransfer
from stepwell.trainers.weight_sync import WeightSync

SAMPLES = 128
"""An update."""


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    async_grpo_trainer.get_peak_flops_per_device = lambda *args: None
    packing.tree_attention = attention_on_a_cpu
    folder, model = Path(asked["folder"]), Path(asked["model"])
    pool = connect(asked["pool"], address=asked["address"], namespace=asked["namespace"])
    sync = WeightSync(
        [asked["engine"]], transfer=CheckpointTransfer(folder / "weights", like=model), pool=pool, probe=()
    )
    trainer = AsyncGRPOTrainer(
        str(model),
        args=settings(folder, asked["updates"]),
        train_dataset=Dataset.from_dict({"prompt": ["the agents have their own"]}),
        rollout_worker=StepwellRolloutWorker(pool, samples_ahead=SAMPLES),
        weight_transfer=StepwellWeightTransfer(sync, pool),
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


def settings(folder: Path, updates: int) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=updates,
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=1,
        token_budget=0,
        learning_rate=5e-4,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def missing() -> list[str]:
    """What TRL asks for and we do not have."""
    asked = {
        StepwellRolloutWorker: async_grpo_trainer.RolloutWorkerProtocol,
        StepwellWeightTransfer: async_grpo_trainer.WeightTransferProtocol,
    }
    calls = {name for ours, protocol in asked.items() for name in vars(protocol).keys() - vars(ours).keys()}
    attributes = {field.name for field in fields(theirs.RolloutSample)} - {
        field.name for field in fields(RolloutSample)
    }
    return sorted(name for name in calls | attributes if not name.startswith("_"))


def attention_on_a_cpu(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Each segment's queries see the path from the root to them; the last query is the path's end."""
    starts_q, starts_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    attended = []
    for i in range(len(starts_q) - 1):
        path = tree_kv_index[starts_k[i] : starts_k[i + 1]]
        queries = query[:, :, starts_q[i] : starts_q[i + 1]]
        behind = len(path) - queries.shape[2]
        is_seen = torch.ones(queries.shape[2], len(path), dtype=torch.bool).tril(behind)
        attended.append(
            torch.nn.functional.scaled_dot_product_attention(
                queries, key[:, :, path], value[:, :, path], attn_mask=is_seen, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


if __name__ == "__main__":
    main()
