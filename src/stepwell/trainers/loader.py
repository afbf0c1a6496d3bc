"""Batches as a plain torch DataLoader, for your own training loop.

- A batch is acknowledged when the next one is requested, so a loop that dies loses nothing.
- A loop that is left with `break` returns its last batch to the pool.
- Rows and trained tokens are chosen as in the reference trainer (trainers/rows.py).
- A batch with nothing to learn is acknowledged and skipped.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stepwell.common.optional import require
from stepwell.trainers.checkpoint import TrainedLedger
from stepwell.trainers.ports import TrainingBatch, TrainingPool
from stepwell.trainers.rows import TrainedRows, choose_rows

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


def pool_loader(
    pool: TrainingPool,
    count: int,
    *,
    batches: int | None = None,
    channel: str = "train",
    timeout: float = 600.0,
    lease: float = 600.0,
) -> "DataLoader[dict[str, torch.Tensor]]":
    """`batches` batches (None: without end) of `count` groups each, as tensors of R rows padded to L tokens.

    `input_ids`, `attention_mask`, `trained` (bool: the tokens to learn), `logprobs` (as sampled) and `advantages` are
    R × L; `reward` is the mean return of the whole batch, including rows that are left out. A row's first token is
    never trained. A batch that is not trained within `lease` seconds comes back, and is then skipped.
    """
    require("torch", "train")
    from torch.utils.data import DataLoader, IterableDataset

    class Batches(IterableDataset[dict[str, "torch.Tensor"]]):
        def __iter__(self) -> "Iterator[dict[str, torch.Tensor]]":
            trained, given = TrainedLedger(), 0
            while batches is None or given < batches:
                batch = pool.fetch_batch(count, timeout=timeout, lease=lease, channel=channel)
                rows = choose_rows(batch, trained)
                if rows.tokens:
                    given += 1
                    try:
                        yield _as_tensors(batch, rows)
                    except GeneratorExit:
                        if not sys.is_finalizing():  # at exit nobody answers, and the lease expires by itself
                            pool.nack(batch)
                        raise
                trained.add(batch.leases, rows.uids)
                trained.acknowledge(pool)

    return DataLoader(Batches(), batch_size=None)


def _as_tensors(batch: TrainingBatch, rows: TrainedRows) -> "dict[str, torch.Tensor]":
    import torch

    (whole,) = rows.passes(sys.maxsize)
    logprobs_R_L, advantages_R_L = (np.zeros(whole.ids_R_L.shape, np.float32) for _ in range(2))
    logprobs_R_L[whole.trained_R_L] = whole.recorded_N
    advantages_R_L[whole.trained_R_L] = whole.advantages_N
    arrays = {
        "input_ids": whole.ids_R_L,
        "attention_mask": whole.attention_R_L,
        "trained": whole.trained_R_L,
        "logprobs": logprobs_R_L,
        "advantages": advantages_R_L,
        "reward": np.array(np.nanmean(batch.rewards_T), np.float32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
