"""Rows for trainers that have one advantage per sample: a row with several (other settings of `advantage`, `credit`)
becomes several samples."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepwell.steps.step import BoolArray, FloatArray, IntArray
from stepwell.trainers.rows import TrainedRows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowSample:
    """The tokens of a row up to the last one with this advantage; arrays have one entry per token."""

    row: int
    """Of the merged rows."""
    tokens: IntArray
    trained: BoolArray
    """Which tokens have the advantage; the others are context."""
    logprobs: FloatArray
    advantage: float


def row_samples(rows: TrainedRows) -> Iterator[RowSample]:
    """One per trained row and advantage in it, in the order of the batch."""
    merged = rows.merged
    for row in np.sort(rows.chosen_R).tolist():
        start, end = merged.offsets_R[row], merged.offsets_R[row + 1]
        trained, advantages = rows.trained[start:end], rows.advantages[start:end]
        for advantage in np.unique(advantages[trained]):
            has_advantage = trained & (advantages == advantage)
            length = int(np.flatnonzero(has_advantage)[-1]) + 1
            here = slice(start, start + length)
            yield RowSample(
                row=row,
                tokens=merged.tokens[here],
                trained=has_advantage[:length],
                logprobs=merged.logprobs[here],
                advantage=float(advantage),
            )
