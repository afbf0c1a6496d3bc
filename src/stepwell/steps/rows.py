"""Trajectories as rows to train on. Steps that extend one another share a row, so that no token is computed twice.

The next prompt of an agent usually repeats the conversation so far, but templates strip thinking, agents compact and
sub-agents branch. A step joins a row only if all tokens of the row are a prefix of its prompt. Otherwise it opens a row
of its own: a fork.

- Each step is in one row. The tokens of a row are those of its last step.
- Every response token of every step stands in one row as written by the model. It is trained there if the step's mask
  says so.
- Reward and advantage belong to the rollout. Each of its rows has the rollout's return, and the weights of its rows sum
  to 1 in proportion to their trained tokens: a fork changes neither the statistics of a group nor the part of a rollout
  in the loss. A rollout in which nothing is trained has weight 0.
- The rows follow from the prefix tree of the batch. Prefixes are searched only in a batch that has no tree.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.columns import NO_BASE, Bases, Columns
from stepwell.steps.layout import IndexArray, offsets, returns_of, sums
from stepwell.steps.padding import Overlong, fitting, ones, spread
from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import BoolArray, FloatArray, IntArray

D = TypeVar("D", bound=np.generic)
NO_VERSION = -1
"""The policy version of a token that no policy wrote, or that is padding."""


class ForkReason(StrEnum):
    """Where a step first differs from the row with which it has most in common."""

    REPEATED = "repeated"
    """Nowhere, but its prompt ends inside the row: the call was repeated, or the agent went back."""
    REPLY_CHANGED = "reply_changed"
    """At a token that the model wrote: thinking stripped, a tool call rendered anew, text encoded anew."""
    CONTEXT_CHANGED = "context_changed"
    """At a token that the model was given: compaction, another system prompt, a sub-agent."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MergedRows:
    """R rows in flat arrays: row r is `[offsets_R[r]:offsets_R[r + 1]]` of the four arrays of tokens."""

    tokens: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    """0 for tokens that the model did not write and for steps that have none; never NaN."""
    versions: IndexArray
    """The policy version that wrote each token; NO_VERSION for all other tokens."""
    offsets_R: IndexArray
    """R + 1 values."""
    has_logprobs_R: BoolArray
    """Do all steps of the row have log-probabilities?"""
    rewards_R: NDArray[np.float64]
    """The rollout's return, the same in all its rows; NaN if no one has scored it."""
    weights_R: NDArray[np.float64]
    trajectory_of_R: IndexArray
    group_of_R: IndexArray
    row_of_S: IndexArray
    """The row of each step of the batch."""
    forks: Counter[ForkReason]
    """How many rows were opened beside a trajectory's first, by reason."""

    def __len__(self) -> int:
        return len(self.offsets_R) - 1

    @property
    def steps_of_R(self) -> list[IndexArray]:  # noqa: N802
        """The steps of each row, in order."""
        in_order = np.argsort(self.row_of_S, kind="stable")
        ends = offsets(np.bincount(self.row_of_S, minlength=len(self)))
        return [in_order[start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedRows:
    """Merged rows, padded on the right to L tokens. All arrays are int64 or float32, as in steps/padding.py."""

    input_ids_R_L: IndexArray
    attention_mask_R_L: IndexArray
    loss_mask_R_L: IndexArray
    logprobs_R_L: FloatArray
    versions_R_L: IndexArray
    kept_R: IndexArray
    """The merged rows that are kept. If rows of a rollout are dropped, its weights sum to less than 1."""


def merge_rows(columns: Columns, trajectory_of_S: IndexArray, group_of_T: IndexArray) -> MergedRows:
    bases = columns.bases
    if bases is None or _crosses_trajectories(bases, trajectory_of_S):
        columns = columns.expanded()
        bases = find_bases(columns, trajectory_of_S)
    row_of_S, last_of_R, forks = _divide(columns, bases, trajectory_of_S)
    rows = len(last_of_R)
    offsets_R, trajectory_of_R = offsets(columns.lengths_S[last_of_R]), trajectory_of_S[last_of_R]
    written = _places(columns, offsets_R[row_of_S])
    total = int(offsets_R[-1])
    known = np.where(np.isnan(columns.logprobs), np.float32(0), columns.logprobs)
    return MergedRows(
        tokens=_row_tokens(columns, row_of_S, last_of_R, offsets_R),
        loss_mask=_placed(columns.mask, written, np.zeros(total, np.bool_)),
        logprobs=_placed(known, written, np.zeros(total, np.float32)),
        versions=_placed(_versions(columns), written, np.full(total, NO_VERSION, np.int64)),
        offsets_R=offsets_R,
        has_logprobs_R=np.bincount(row_of_S, ~columns.has_logprobs_S, rows) == 0,
        rewards_R=returns_of(columns.rewards_S, trajectory_of_S)[trajectory_of_R],
        weights_R=_weights(sums(columns.mask, columns.response_lengths_S), row_of_S, trajectory_of_R),
        trajectory_of_R=trajectory_of_R,
        group_of_R=group_of_T[trajectory_of_R],
        row_of_S=row_of_S,
        forks=forks,
    )


def _crosses_trajectories(bases: Bases, trajectory_of_S: IndexArray) -> bool:
    """Does a step build on one of another trajectory? So it is if a trajectory was divided after it was shipped."""
    return bool(((bases.base_S != NO_BASE) & (trajectory_of_S[bases.base_S] != trajectory_of_S)).any())


def find_bases(columns: Columns, trajectory_of_S: IndexArray) -> Bases:
    """The prefix tree of steps that were packed without one."""
    base_S, shared_S = np.full(len(columns), NO_BASE, np.int32), np.zeros(len(columns), np.int32)
    tokens, starts = columns.tokens, columns.token_offsets_S.tolist()
    ends_T = offsets(np.bincount(trajectory_of_S)).tolist() if len(columns) else [0]
    for first, end in pairwise(ends_T):
        if end - first > 1:
            tree = PrefixTree()
            steps = [tokens[start:stop] for start, stop in pairwise(starts[first : end + 1])]
            found = tree.bases([(tree.place(step).branch, len(step)) for step in steps], first)
            base_S[first:end], shared_S[first:end] = np.array(found, np.int32).T
    return Bases(base_S, shared_S)


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


# -- which steps share a row -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _OpenRow:
    """A row that later steps of its trajectory may join."""

    number: int
    last: int
    """Its last step."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """From where to where the model wrote."""

    def is_written(self, position: int) -> bool:
        return any(start <= position < end for start, end in self.written)


class _OpenRows:
    """The rows of one trajectory, found by the point of the prefix tree at which they end.

    A point is (step, length): the first step that has these tokens, and how many. Equal prefixes have the same point.
    """

    def __init__(self, bases: list[int], shared: list[int]) -> None:
        self._bases, self._shared = bases, shared
        self._rows: list[_OpenRow] = []
        self._ends: dict[int, dict[int, list[_OpenRow]]] = {}
        """The rows that end among the tokens a step adds, by step and length; the newest row comes last."""

    def first_step(self, step: int, length: int) -> int:
        """The first step that begins with the first `length` tokens of this one."""
        while self._shared[step] >= length > 0:
            step = self._bases[step]
        return step

    def longest(self, step: int, prompt_length: int) -> _OpenRow | None:
        """The longest row that the prompt begins with; of equal rows the newest."""
        limit = prompt_length
        while step != NO_BASE:
            ends = self._ends.get(step)
            if ends and (length := max((end for end in ends if end <= limit), default=0)):
                return ends[length][-1]
            limit = min(limit, self._shared[step])
            step = self._bases[step]
        return None

    def open(self, number: int, step: int, prompt_length: int, length: int) -> None:
        row = _OpenRow(number, step)
        self._rows.append(row)
        self._end(row, step, prompt_length, length)

    def extend(self, row: _OpenRow, step: int, prompt_length: int, length: int) -> None:
        end = row.written[-1][1]
        ends = self._ends[self.first_step(row.last, end)]
        ends[end].remove(row)
        if not ends[end]:
            del ends[end]
        self._end(row, step, prompt_length, length)

    def fork_reason(self, step: int, prompt_length: int) -> ForkReason | None:
        """Why the step cannot join any row; None if it is the first of its trajectory."""
        if not self._rows:
            return None
        shared = self._shared[step]
        if shared >= prompt_length:
            return ForkReason.REPEATED
        closest = self._rows[-1]
        if shared:
            point = self.first_step(step, shared)
            closest = next(row for row in reversed(self._rows) if self._passes(row, point, shared))
        return ForkReason.REPLY_CHANGED if closest.is_written(shared) else ForkReason.CONTEXT_CHANGED

    def _passes(self, row: _OpenRow, point: int, length: int) -> bool:
        return row.written[-1][1] >= length and self.first_step(row.last, length) == point

    def _end(self, row: _OpenRow, step: int, prompt_length: int, length: int) -> None:
        row.last = step
        row.written.append((prompt_length, length))
        point = self.first_step(step, length)
        of_length = self._ends.setdefault(point, {}).setdefault(length, [])
        of_length.append(row)
        of_length.sort(key=lambda other: other.number)


def _divide(
    columns: Columns, bases: Bases, trajectory_of_S: IndexArray
) -> tuple[IndexArray, IndexArray, Counter[ForkReason]]:
    """The row of each step, the last step of each row, and how many rows were opened beside a trajectory's first."""
    row_of_S = np.empty(len(columns), np.int64)
    last_of_R: list[int] = []
    forks: Counter[ForkReason] = Counter()
    base, shared = bases.base_S.tolist(), bases.shared_S.tolist()
    prompts, lengths = columns.prompt_lengths_S.tolist(), columns.lengths_S.tolist()
    trajectory, rows = -1, _OpenRows(base, shared)
    for step, of_step in enumerate(trajectory_of_S.tolist()):
        if of_step != trajectory:
            trajectory, rows = of_step, _OpenRows(base, shared)
        row = rows.longest(base[step], min(prompts[step], shared[step]))
        if row is not None:
            rows.extend(row, step, prompts[step], lengths[step])
            number = row.number
            last_of_R[number] = step
        else:
            if (reason := rows.fork_reason(step, prompts[step])) is not None:
                forks[reason] += 1
            number = len(last_of_R)
            rows.open(number, step, prompts[step], lengths[step])
            last_of_R.append(step)
        row_of_S[step] = number
    return row_of_S, np.array(last_of_R, np.int64), forks


# -- what the rows hold ------------------------------------------------------------------------------------------------


def _row_tokens(columns: Columns, row_of_S: IndexArray, last_of_R: IndexArray, offsets_R: IndexArray) -> IntArray:
    """The tokens of each row's last step: what the steps of the row add, and before that what an earlier row has."""
    bases = columns.bases
    shared_S = np.zeros(len(columns), np.int32) if bases is None else bases.shared_S
    starts, shared = offsets(columns.lengths_S - shared_S).tolist(), shared_S.tolist()
    base = [] if bases is None else bases.base_S.tolist()
    tokens, row_of, at = np.empty(int(offsets_R[-1]), np.int32), row_of_S.tolist(), offsets_R.tolist()
    for row, step in enumerate(last_of_R.tolist()):
        start, end = at[row], at[row + 1] - at[row]
        while end:
            if shared[step] < end:
                tokens[start + shared[step] : start + end] = columns.added[
                    starts[step] : starts[step] + end - shared[step]
                ]
                end = shared[step]
            if end:
                step = base[step]
                if (earlier := row_of[step]) < row:
                    tokens[start : start + end] = tokens[at[earlier] : at[earlier] + end]
                    end = 0
    return tokens


def _places(columns: Columns, row_starts_S: IndexArray) -> IndexArray:
    """The position of each response token among the tokens of all rows: in its row, behind the step's prompt."""
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
