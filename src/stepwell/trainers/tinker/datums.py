"""Rows of a batch as Tinker's `Datum`s.

- A row ends with its last trained token: what follows it teaches nothing.
- Every target counts at the service, so a token that is not trained has advantage 0.
- The weight of a token's loss in that of the batch is part of its advantage. The losses are linear in the advantage, so
  `loss_aggregation` means what it means in the reference trainer, whether the service sums losses or averages them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np

from stepwell.errors import BadRequest
from stepwell.steps.step import FloatArray, IntArray
from stepwell.trainers.algorithms import LossAggregation, token_weights
from stepwell.trainers.rows import TrainedRows

ServiceLoss: TypeAlias = Literal["sum", "mean"]


@dataclass(frozen=True, slots=True, eq=False)
class DatumRow:
    """All four are equally long: a target follows the token at its place."""

    inputs: IntArray
    targets: IntArray
    logprobs: FloatArray
    """Log-probabilities of the targets when they were sampled; 0 where nothing is trained, NaN where one is missing."""
    advantages: FloatArray
    versions: IntArray
    """The version that sampled each target; -1 where nothing is trained."""


def datum_rows(
    rows: TrainedRows,
    aggregation: LossAggregation = "token_mean",
    fixed_length: int = 1,
    *,
    multiple: int = 1,
    service_loss: ServiceLoss = "sum",
) -> list[DatumRow]:
    """One for each row with a trained token, the shortest first; then copies of the last one with advantage 0, up to a
    multiple of `multiple` rows."""
    found = list(_datum_rows(rows, aggregation, fixed_length))
    if not found:
        return []
    last = found[-1]
    nothing, no_version = np.zeros_like(last.advantages), np.full_like(last.versions, -1)
    filler = DatumRow(last.inputs, last.targets, last.logprobs, nothing, no_version)
    filled = found + [filler] * (-len(found) % multiple)
    return [_undo_mean(row, len(filled)) for row in filled] if service_loss == "mean" else filled


def _undo_mean(row: DatumRow, rows: int) -> DatumRow:
    """The service divides by the row's targets and by the rows: what is sent is so much larger."""
    return replace(row, advantages=row.advantages * np.float32(len(row.targets) * rows))


def _datum_rows(rows: TrainedRows, aggregation: LossAggregation, fixed_length: int) -> Iterator[DatumRow]:
    merged = rows.merged
    sequences = np.repeat(merged.trajectory_of_R, np.diff(merged.offsets_R))[rows.trained]
    advantages = np.zeros(len(rows.trained), np.float32)
    advantages[rows.trained] = rows.advantages[rows.trained] * token_weights(aggregation, sequences, fixed_length)
    for row in rows.chosen_R.tolist():
        start, end = merged.offsets_R[row], merged.offsets_R[row + 1]
        end = start + int(np.flatnonzero(rows.trained[start:end])[-1]) + 1
        targets = slice(start + 1, end)
        trained = rows.trained[targets]
        yield DatumRow(
            inputs=merged.tokens[start : end - 1],
            targets=merged.tokens[targets],
            logprobs=np.where(trained, merged.logprobs[targets], np.float32(0.0)).astype(np.float32),
            advantages=advantages[targets],
            versions=np.where(trained, merged.versions[targets], -1),
        )


def to_datums(rows: Sequence[DatumRow]) -> list[Datum]:
    types = imported_tinker().types
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row.inputs.tolist()),
            loss_fn_inputs={
                "target_tokens": row.targets.astype(np.int64),
                "logprobs": np.nan_to_num(row.logprobs),
                "advantages": row.advantages,
            },
        )
        for row in rows
    ]


def imported_tinker() -> ModuleType:
    try:
        return import_module("tinker")
    except ModuleNotFoundError as missing:
        raise BadRequest(
            f"a Tinker service is reached with tinker, and {missing.name} is not installed: pip install tinker==0.25.0"
        ) from missing


def with_logprobs(rows: Sequence[DatumRow], computed: Sequence[FloatArray]) -> list[DatumRow]:
    """The rows with computed log-probabilities in place of missing ones."""
    return [
        replace(row, logprobs=np.where(np.isnan(row.logprobs), np.asarray(own, np.float32), row.logprobs))
        for row, own in zip(rows, computed, strict=True)
    ]


def logprob_gap(rows: Sequence[DatumRow], outputs: Sequence[FloatArray], version: int) -> float | None:
    """The mean difference between the engines' log-probabilities and the service's, of the tokens that this version
    sampled; None if there are none."""
    differences = [
        np.abs(np.asarray(told, np.float64) - row.logprobs)[(row.versions == version) & ~np.isnan(row.logprobs)]
        for row, told in zip(rows, outputs, strict=True)
    ]
    whole = np.concatenate(differences) if differences else np.zeros(0)
    return float(whole.mean()) if len(whole) else None
