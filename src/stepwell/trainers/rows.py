"""Which rows of a batch are trained, and in which passes.

- A rollout is trained in all its rows or in none.
- A group is left out if it was trained before, or if all its rollouts have the same return.
- A rollout is left out if it is unscored, or if log-probabilities are missing.
- All of it depends on the batch alone, so a resumed run makes the same passes.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.advantages import group_advantages
from stepwell.steps.layout import IndexArray, parts_of, sums
from stepwell.steps.padding import ones, spread
from stepwell.steps.rows import MergedRows
from stepwell.steps.step import BoolArray, FloatArray
from stepwell.trainers.ports import TrainingBatch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pass:
    """Rows that go through the model together, padded on the right to L tokens; N tokens of them are trained."""

    ids_R_L: IndexArray
    attention_R_L: IndexArray
    trained_R_L: BoolArray
    recorded_N: FloatArray
    """The tokens' log-probabilities when they were sampled."""
    advantages_N: FloatArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedRows:
    merged: MergedRows
    advantages_T: NDArray[np.float64]
    chosen_R: IndexArray
    """The trained rows, the shortest first."""
    trained: BoolArray
    """Which tokens of all rows are trained."""
    uids_T: list[str]
    is_new_T: BoolArray
    """Which rollouts were not trained before."""

    @property
    def tokens(self) -> int:
        return int(self.trained.sum())

    @property
    def uids(self) -> tuple[str, ...]:
        """The rollouts that count as trained with this batch, including those left out because they teach nothing."""
        return tuple(uid for uid, is_new in zip(self.uids_T, self.is_new_T.tolist(), strict=True) if is_new)

    def passes(self, tokens: int) -> Iterator[Pass]:
        """As many rows at a time as fit into `tokens` with their padding, but at least one."""
        lengths_R = np.diff(self.merged.offsets_R)
        rows: list[int] = []
        for row in self.chosen_R.tolist():
            if rows and (len(rows) + 1) * lengths_R[row] > tokens:
                yield self._pass(np.array(rows))
                rows = []
            rows.append(row)
        if rows:
            yield self._pass(np.array(rows))

    def _pass(self, rows: IndexArray) -> Pass:
        merged = self.merged
        at, lengths = merged.offsets_R[rows], np.diff(merged.offsets_R)[rows]
        shape = (len(rows), int(lengths.max()))
        trained_R_L = spread(self.trained, at, lengths, np.zeros(shape, np.bool_))
        recorded_R_L = spread(merged.logprobs, at, lengths, np.zeros(shape, np.float32))
        advantages_R = self.advantages_T[merged.trajectory_of_R[rows]]
        return Pass(
            ids_R_L=spread(merged.tokens, at, lengths, np.zeros(shape, np.int64)),
            attention_R_L=ones(np.zeros_like(lengths), lengths, shape[1]),
            trained_R_L=trained_R_L,
            recorded_N=recorded_R_L[trained_R_L],
            advantages_N=np.repeat(advantages_R, trained_R_L.sum(1)).astype(np.float32),
        )


def choose_rows(batch: TrainingBatch, known: Container[str]) -> TrainedRows:
    """`known` are the rollouts trained before: if their groups come back, they are not trained again."""
    merged, group_of_T = batch.merged(), batch.group_of_T
    _, firsts_T = np.unique(batch.trajectory_of_S, return_index=True)
    uids_T = [batch.columns.trajectory_uids[i] for i in firsts_T.tolist()]
    known_T = np.array([uid in known for uid in uids_T], np.bool_)
    is_new_T = ~np.isin(group_of_T, group_of_T[known_T])
    advantages_T = group_advantages(batch.rewards_T, group_of_T)
    teaches_T = np.isin(group_of_T, group_of_T[np.nan_to_num(advantages_T) != 0.0])
    wanted_T = is_new_T & teaches_T & ~np.isnan(advantages_T) & ~_lacks_logprobs(batch)
    trained = _trained(merged, wanted_T)
    lengths_R = np.diff(merged.offsets_R)
    has_some_R = np.bincount(parts_of(lengths_R), trained, len(lengths_R)) > 0
    shortest_first = np.argsort(lengths_R, kind="stable")
    return TrainedRows(
        merged=merged,
        advantages_T=advantages_T,
        chosen_R=shortest_first[has_some_R[shortest_first]],
        trained=trained,
        uids_T=uids_T,
        is_new_T=is_new_T,
    )


def _lacks_logprobs(batch: TrainingBatch) -> BoolArray:
    """Which rollouts have a token to train without a recorded log-probability."""
    columns = batch.columns
    missing_S = sums(np.isnan(columns.logprobs) & columns.mask, columns.response_lengths_S)
    lacking_T: BoolArray = np.bincount(batch.trajectory_of_S, missing_S, len(batch.group_of_T)) > 0
    return lacking_T


def _trained(merged: MergedRows, wanted_T: BoolArray) -> BoolArray:
    lengths_R = np.diff(merged.offsets_R)
    trained: BoolArray = merged.loss_mask & np.repeat(wanted_T[merged.trajectory_of_R], lengths_R)
    trained[merged.offsets_R[:-1][lengths_R > 0]] = False  # a row's first token follows nothing
    return trained
