"""Batches as a plain torch DataLoader, for your own training loop.

- A batch is acknowledged when the next one is requested, so a loop that dies loses nothing.
- A loop that is left with `break` returns its last batch to the pool.
- Rows and trained tokens are chosen as in the reference trainer (trainers/rows.py).
- A token without a recorded log-probability is marked; the loop computes it.
- A batch with nothing to learn is acknowledged and skipped; too many in a row end the loop with NothingLearned.
"""

import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from stepwell.common.imports import require
from stepwell.pool.client import DataPool
from stepwell.steps.rows import NO_VERSION
from stepwell.steps.step import FloatArray
from stepwell.trainers.feed import Feed
from stepwell.trainers.rows import TrainedRows
from stepwell.trainers.settings import FeedSettings, RowSettings, choose_old_logprobs

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

AT_TEMPERATURE_1 = RowSettings(temperature=1.0)


def pool_loader(
    pool: DataPool,
    count: int,
    *,
    batches: int | None = None,
    channel: str = "train",
    timeout: float = 600.0,
    lease: float = 600.0,
    rows: RowSettings | None = None,
    max_unlearnable: int | None = 20,
) -> "DataLoader[dict[str, torch.Tensor]]":
    """`batches` batches (None: without end) of `count` groups each, as tensors of R rows padded to L tokens.

    `input_ids`, `attention_mask`, `trained` (bool: the tokens to learn), `logprobs` (as sampled), `missing_logprobs`
    (bool: tokens to learn that were recorded without one; their `logprobs` are NaN, and the loop puts its own there),
    `advantages` and `temperatures` (by which logits are divided) are R × L; `reward` is the mean return of the whole
    batch, including rows that are left out. A row's first token is never trained. A batch that is not trained within
    `lease` seconds comes back, and is then skipped. By default only what was sampled at temperature 1 is trained, so
    that a loop need not divide; `rows=RowSettings()` includes all. After `max_unlearnable` batches in a row from which
    nothing can be learned, the loop ends with NothingLearned.
    """
    require("torch", "train")
    from torch.utils.data import DataLoader, IterableDataset

    def terms(rows: RowSettings) -> FeedSettings:
        same = {of.name: getattr(rows, of.name) for of in fields(RowSettings)}
        return FeedSettings(
            **same, channel=channel, fetch_timeout=timeout, lease=lease, max_unlearnable=max_unlearnable
        )

    class Batches(IterableDataset[dict[str, "torch.Tensor"]]):
        def __iter__(self) -> "Iterator[dict[str, torch.Tensor]]":
            settings = choose_old_logprobs(
                rows or AT_TEMPERATURE_1,
                ("current", "recorded"),
                "a loader has no model; your loop puts its log-probabilities where `missing_logprobs` is True",
            )
            feed, given = Feed(pool, terms(settings)), 0
            while batches is None or given < batches:
                chosen = feed.take(count).rows
                if chosen.tokens:
                    given += 1
                    try:
                        yield _as_tensors(chosen)
                    except GeneratorExit:
                        if not sys.is_finalizing():  # at exit nobody answers, and the lease expires by itself
                            feed.give_back()
                        raise
                feed.count_as_trained()
                feed.acknowledge()
                feed.monitor.check(chosen, pool.stats().policy_version if chosen.missing.any() else NO_VERSION)

    return DataLoader(Batches(), batch_size=None)


def _as_tensors(rows: TrainedRows) -> "dict[str, torch.Tensor]":
    import torch

    (whole,) = rows.passes(sys.maxsize)

    def placed(values_N: FloatArray, filler: float = 0.0) -> FloatArray:
        values_R_L = np.full(whole.ids_R_L.shape, filler, np.float32)
        values_R_L[whole.trained_R_L] = values_N
        return values_R_L

    arrays = {
        "input_ids": whole.ids_R_L,
        "attention_mask": whole.attention_R_L,
        "trained": whole.trained_R_L,
        "logprobs": placed(whole.recorded_N),
        "missing_logprobs": np.isnan(placed(whole.recorded_N)),
        "advantages": placed(whole.advantages_N),
        "temperatures": placed(whole.temperatures_N, 1.0),
        "reward": np.array(rows.reward, np.float32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
