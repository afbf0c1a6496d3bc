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
    merged, places = rows.merged, np.flatnonzero(rows.trained)
    advantages, bounds_R = rows.advantages[places], np.searchsorted(places, merged.offsets_R).tolist()
    starts_R = merged.offsets_R.tolist()
    for row in np.sort(rows.chosen_R).tolist():
        start, own = starts_R[row], slice(bounds_R[row], bounds_R[row + 1])
        places_here, advantages_here = places[own], advantages[own]
        is_one = bool((advantages_here == advantages_here[0]).all())
        for advantage in advantages_here[:1] if is_one else np.unique(advantages_here):
            places_of = places_here if is_one else places_here[advantages_here == advantage]
            here = slice(start, int(places_of[-1]) + 1)
            trained = rows.trained[here].copy()
            if not is_one:
                trained[:] = False
                trained[places_of - start] = True
            yield RowSample(
                row=row,
                tokens=merged.tokens[here],
                trained=trained,
                logprobs=merged.logprobs[here],
                advantage=float(advantage),
            )
