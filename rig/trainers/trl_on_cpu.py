"""TRL is made for GPUs. On a CPU two of its functions are replaced, before its trainer is constructed: the one that
asks CUDA for the device's name, and attention, for which it has a GPU's kernel only. Imported in TRL's environment."""

from pathlib import Path
from typing import Any

import torch
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing  # type: ignore[import-not-found]


def prepare() -> None:
    torch.set_num_threads(1)
    async_grpo_trainer.get_peak_flops_per_device = lambda *args: None
    packing.tree_attention = attention_on_a_cpu


def settings(folder: Path, *, updates: int, samples: int, micro_batches: int = 1, **others: Any) -> AsyncGRPOConfig:
    """An update has so many micro-batches of so many samples."""
    return AsyncGRPOConfig(
        output_dir=str(folder),
        max_steps=updates,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=micro_batches,
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
        report_to="none",
        disable_tqdm=True,
        **others,
    )


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
