"""Trajectories as rows to train on: steps that extend one another share a row, so that no token is computed twice.

What always holds: every response token of every step stands in exactly one row as written by the model, and is trained
there exactly if the step's mask says so. Reward and advantage belong to the rollout, not to its rows: each row carries
the rollout's return, and the weights of a rollout's rows sum to 1 in the proportion of their trained tokens, so that
forking changes neither a group's statistics nor a rollout's part in the loss. A rollout in which nothing is trained has
weight 0 throughout.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.columns import Columns
from stepwell.steps.layout import IndexArray, offsets, returns_of, sums, token_offsets, with_logprobs
from stepwell.steps.padding import Overlong, fitting, ones, spread
from stepwell.steps.step import BoolArray, FloatArray, IntArray
from stepwell.steps.stitch import ForkReason, stitch

D = TypeVar("D", bound=np.generic)
NO_VERSION = -1
"""The policy version of a token that no policy wrote, or that is padding."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MergedRows:
    """R rows, flat: row r is `[offsets_R[r]:offsets_R[r + 1]]` of the four arrays of tokens."""

    tokens: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    """0 where the model did not write, or where the step has none; never NaN."""
    versions: IndexArray
    """The policy version that wrote each token; NO_VERSION where none did."""
    offsets_R: IndexArray
    """R + 1 long."""
    has_logprobs_R: BoolArray
    """Do all steps of the row have log-probabilities?"""
    rewards_R: NDArray[np.float64]
    """The rollout's return, the same in all its rows; NaN if no one has scored."""
    weights_R: NDArray[np.float64]
    trajectory_of_R: IndexArray
    group_of_R: IndexArray
    row_of_S: IndexArray
    """In which row each of the batch's steps is."""
    forks: Counter[ForkReason]
    """How many rows were opened beside a trajectory's first, by reason."""

    def __len__(self) -> int:
        return len(self.offsets_R) - 1

    @property
    def steps_of_R(self) -> list[IndexArray]:  # noqa: N802
        """Which of the batch's steps are in each row, in order."""
        in_order = np.argsort(self.row_of_S, kind="stable")
        ends = offsets(np.bincount(self.row_of_S, minlength=len(self)))
        return [in_order[start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedRows:
    """Merged rows, padded on the right to L tokens; int64 and float32 throughout, as in steps/padding.py."""

    input_ids_R_L: IndexArray
    attention_mask_R_L: IndexArray
    loss_mask_R_L: IndexArray
    logprobs_R_L: FloatArray
    versions_R_L: IndexArray
    kept_R: IndexArray
    """Which of the merged rows these are. Once rows are dropped, the weights of a rollout sum to less than 1."""


def merge_steps(columns: Columns, trajectory_of_S: IndexArray, group_of_T: IndexArray) -> MergedRows:
    stitching = stitch(columns, trajectory_of_S)
    row_of_S, rows = stitching.row_of_S, stitching.rows
    last_of_R = np.zeros(rows, np.int64)
    np.maximum.at(last_of_R, row_of_S, np.arange(len(columns)))
    starts = token_offsets(columns)
    offsets_R, trajectory_of_R = offsets(np.diff(starts)[last_of_R]), trajectory_of_S[last_of_R]
    written = _places(columns, offsets_R[row_of_S])
    total = int(offsets_R[-1])
    known = np.where(np.isnan(columns.logprobs), np.float32(0), columns.logprobs)
    return MergedRows(
        tokens=np.concatenate([columns.tokens[:0], *(columns.tokens[starts[i] : starts[i + 1]] for i in last_of_R)]),
        loss_mask=_placed(columns.mask, written, np.zeros(total, np.bool_)),
        logprobs=_placed(known, written, np.zeros(total, np.float32)),
        versions=_placed(_versions(columns), written, np.full(total, NO_VERSION, np.int64)),
        offsets_R=offsets_R,
        has_logprobs_R=np.bincount(row_of_S, ~with_logprobs(columns), rows) == 0,
        rewards_R=returns_of(columns, trajectory_of_S)[trajectory_of_R],
        weights_R=_weights(sums(columns.mask, columns.response_lengths_S), row_of_S, trajectory_of_R),
        trajectory_of_R=trajectory_of_R,
        group_of_R=group_of_T[trajectory_of_R],
        row_of_S=row_of_S,
        forks=stitching.forks,
    )


def pad_rows(merged: MergedRows, length: int, *, pad_id: int, overlong: Overlong) -> PaddedRows:
    lengths_R = np.diff(merged.offsets_R)
    kept = fitting({f"rows are longer than {length}": (lengths_R, length)}, overlong)
    at, lengths, shape = merged.offsets_R[kept], lengths_R[kept], (len(kept), length)
    return PaddedRows(
        input_ids_R_L=spread(merged.tokens, at, lengths, np.full(shape, pad_id, np.int64)),
        attention_mask_R_L=ones(np.zeros_like(lengths), lengths, length),
        loss_mask_R_L=spread(merged.loss_mask, at, lengths, np.zeros(shape, np.int64)),
        logprobs_R_L=spread(merged.logprobs, at, lengths, np.zeros(shape, np.float32)),
        versions_R_L=spread(merged.versions, at, lengths, np.full(shape, NO_VERSION, np.int64)),
        kept_R=kept,
    )


def _places(columns: Columns, row_starts_S: IndexArray) -> IndexArray:
    """Where each response token stands among the tokens of all rows: in its row, behind its step's prompt."""
    responses = columns.response_lengths_S
    first_S = row_starts_S + columns.prompt_lengths_S - offsets(responses)[:-1]
    return np.repeat(first_S, responses) + np.arange(responses.sum())


def _placed(values: NDArray[D], places: IndexArray, into: NDArray[D]) -> NDArray[D]:
    into[places] = values
    return into


def _versions(columns: Columns) -> IndexArray:
    """The policy version that wrote each response token."""
    responses = columns.response_lengths_S
    versions = np.repeat(columns.policy_versions_S, responses)
    for spans, at, length in zip(columns.version_spans, offsets(responses).tolist(), responses.tolist(), strict=False):
        for span in spans:
            versions[at + min(span.start, length) : at + min(span.end, length)] = span.version
    return versions


def _weights(trained_S: IndexArray, row_of_S: IndexArray, trajectory_of_R: IndexArray) -> NDArray[np.float64]:
    trained_R = np.bincount(row_of_S, trained_S, len(trajectory_of_R))
    trained_T = np.bincount(trajectory_of_R, trained_R)
    of_rollout_R = trained_T[trajectory_of_R]
    return np.divide(trained_R, of_rollout_R, out=np.zeros(len(trained_R)), where=of_rollout_R > 0)
