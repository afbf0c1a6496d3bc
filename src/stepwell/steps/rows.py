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

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.columns import NO_BASE, Columns, PrefixLinks
from stepwell.steps.layout import IndexArray, is_first, offsets, returns_of, sums
from stepwell.steps.padding import ArrayRecord, Overlong, fitting, ones, spread
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
    """The fork is at a token that the model wrote: thinking stripped, a tool call rendered anew, text encoded anew."""
    CONTEXT_CHANGED = "context_changed"
    """The fork is at a token that the model was given: compaction, another system prompt, a sub-agent."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedRows(ArrayRecord):
    """Merged rows, padded on the right to L tokens. All arrays are int64 or float32, as in steps/padding.py."""

    input_ids_R_L: IndexArray
    attention_mask_R_L: IndexArray
    loss_mask_R_L: IndexArray
    logprobs_R_L: FloatArray
    versions_R_L: IndexArray
    temperatures_R_L: FloatArray
    kept_R: IndexArray
    """The merged rows that are kept. If rows of a rollout are dropped, its weights sum to less than 1."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MergedRows(ArrayRecord):
    """R rows in flat arrays: row r is `[offsets_R[r]:offsets_R[r + 1]]` of the arrays of tokens."""

    tokens: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    """0 for tokens that the model did not write and for steps that have none; never NaN."""
    versions: IndexArray
    """The policy version that wrote each token; NO_VERSION for all other tokens."""
    temperatures: FloatArray
    """The temperature at which each token was sampled; 1 for all other tokens, 0 if it is not known. A trainer divides
    the logits by it."""
    places: IndexArray
    """Where each response token of the batch's columns stands among the tokens of the rows."""
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

    def padded(self, length: int, *, pad_id: int = 0, overlong: Overlong = "raise") -> PaddedRows:
        """Rows of `length` tokens. A longer row raises, or is left out with `overlong="drop"`."""
        lengths_R = np.diff(self.offsets_R)
        kept = fitting({f"rows are longer than {length}": (lengths_R, length)}, overlong)
        at, lengths, shape = self.offsets_R[kept], lengths_R[kept], (len(kept), length)
        return PaddedRows(
            input_ids_R_L=spread(self.tokens, at, lengths, np.full(shape, pad_id, np.int64)),
            attention_mask_R_L=ones(np.zeros_like(lengths), lengths, length),
            loss_mask_R_L=spread(self.loss_mask, at, lengths, np.zeros(shape, np.int64)),
            logprobs_R_L=spread(self.logprobs, at, lengths, np.zeros(shape, np.float32)),
            versions_R_L=spread(self.versions, at, lengths, np.full(shape, NO_VERSION, np.int64)),
            temperatures_R_L=spread(self.temperatures, at, lengths, np.ones(shape, np.float32)),
            kept_R=kept,
        )


def merge_rows(columns: Columns, trajectory_of_S: IndexArray, group_of_T: IndexArray) -> MergedRows:
    bases = bases_within(columns, trajectory_of_S)
    if bases is not columns.bases:
        columns = columns.expanded()
    row_of_S, last_of_R, forks = _divide(columns, bases, trajectory_of_S)
    rows = len(last_of_R)
    offsets_R, trajectory_of_R = offsets(columns.lengths_S[last_of_R]), trajectory_of_S[last_of_R]
    written = _places(columns, offsets_R[row_of_S])
    total = int(offsets_R[-1])
    temperatures = np.repeat(np.nan_to_num(columns.temperatures_S), columns.response_lengths_S).astype(np.float32)
    known = np.where(np.isnan(columns.logprobs), np.float32(0), columns.logprobs)
    return MergedRows(
        tokens=_row_tokens(columns, row_of_S, last_of_R, offsets_R),
        loss_mask=_placed(columns.mask, written, np.zeros(total, np.bool_)),
        logprobs=_placed(known, written, np.zeros(total, np.float32)),
        versions=_placed(_versions(columns), written, np.full(total, NO_VERSION, np.int64)),
        temperatures=_placed(temperatures, written, np.ones(total, np.float32)),
        places=written,
        offsets_R=offsets_R,
        has_logprobs_R=np.bincount(row_of_S, ~columns.has_logprobs_S, rows) == 0,
        rewards_R=returns_of(columns.returns_S, columns.rewards_S, trajectory_of_S)[trajectory_of_R],
        weights_R=_weights(sums(columns.mask, columns.response_lengths_S), row_of_S, trajectory_of_R),
        trajectory_of_R=trajectory_of_R,
        group_of_R=group_of_T[trajectory_of_R],
        row_of_S=row_of_S,
        forks=forks,
    )


def bases_within(columns: Columns, trajectory_of_S: IndexArray) -> PrefixLinks:
    """The prefix tree of a batch, in which no step builds on one of another trajectory."""
    bases = columns.bases
    if bases is None or _crosses_trajectories(bases, trajectory_of_S):
        return find_bases(columns.expanded(), trajectory_of_S)
    return bases


def _crosses_trajectories(bases: PrefixLinks, trajectory_of_S: IndexArray) -> bool:
    """Does a step build on one of another trajectory? So it is if a trajectory was divided after it was shipped."""
    return bool(((bases.base_S != NO_BASE) & (trajectory_of_S[bases.base_S] != trajectory_of_S)).any())


def find_bases(columns: Columns, trajectory_of_S: IndexArray) -> PrefixLinks:
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
    return PrefixLinks(base_S, shared_S)


# -- which steps share a row -------------------------------------------------------------------------------------------


class _RowBuilder:
    """Divides steps into rows, in order. A row is found by the point of the prefix tree at which it ends.

    A point is (step, length): the first step that has these tokens, and how many. Equal prefixes have the same point.
    """

    def __init__(self, columns: Columns, bases: PrefixLinks) -> None:
        self.steps_of_R: list[list[int]] = []
        """The steps of each row, in order."""
        self._bases, self._shared = bases.base_S.tolist(), bases.shared_S.tolist()
        self._prompts, self._lengths = columns.prompt_lengths_S.tolist(), columns.lengths_S.tolist()
        self._ends: dict[int, dict[int, list[int]]] = {}
        """The rows that end among the tokens a step adds, by step and length; the newest row comes last."""
        self._next: dict[int, tuple[int, int]] = {}
        """Where a search that found nothing in a step goes on: at which earlier step, and up to which length. It leaves
        out the steps in which it would find nothing, so that many forks do not make a search long."""

    def find(self, step: int) -> int | None:
        """The longest row that the step's prompt begins with; of equal rows the newest."""
        limit, earlier = min(self._prompts[step], self._shared[step]), self._bases[step]
        row, passed = None, []
        while earlier != NO_BASE:
            ends = self._ends.get(earlier)
            if ends and (length := max((end for end in ends if end <= limit), default=0)):
                row = ends[length][-1]
                break
            if limit < self._shared[earlier]:
                earlier = self._bases[earlier]
            else:
                passed.append(earlier)
                earlier, limit = self._next.get(earlier, (self._bases[earlier], self._shared[earlier]))
        self._next.update(dict.fromkeys(passed, (earlier, limit)))
        return row

    def open(self, step: int) -> None:
        self.steps_of_R.append([])
        self._append(len(self.steps_of_R) - 1, step)

    def extend(self, row: int, step: int) -> None:
        last = self.steps_of_R[row][-1]
        length = self._lengths[last]
        ends = self._ends[self._first_step(last, length)]
        ends[length].remove(row)
        if not ends[length]:
            del ends[length]
        self._append(row, step)

    def fork_reason(self, step: int, rows: range) -> ForkReason:
        """Why the step cannot join any of these rows, the earlier ones of its trajectory."""
        shared = self._shared[step]
        if shared >= self._prompts[step]:
            return ForkReason.REPEATED
        point = self._first_step(step, shared)
        closest = next(row for row in reversed(rows) if not shared or self._passes(row, point, shared))
        is_written = any(self._prompts[s] <= shared < self._lengths[s] for s in self.steps_of_R[closest])
        return ForkReason.REPLY_CHANGED if is_written else ForkReason.CONTEXT_CHANGED

    def _first_step(self, step: int, length: int) -> int:
        """The first step that begins with the first `length` tokens of this one."""
        while self._shared[step] >= length > 0:
            step = self._bases[step]
        return step

    def _passes(self, row: int, point: int, length: int) -> bool:
        last = self.steps_of_R[row][-1]
        return self._lengths[last] >= length and self._first_step(last, length) == point

    def _append(self, row: int, step: int) -> None:
        self.steps_of_R[row].append(step)
        length = self._lengths[step]
        first = self._first_step(step, length)
        if first != step:  # a search that left out the first step may now find this row there
            self._next.clear()
        insort(self._ends.setdefault(first, {}).setdefault(length, []), row)


def _divide(
    columns: Columns, bases: PrefixLinks, trajectory_of_S: IndexArray
) -> tuple[IndexArray, IndexArray, Counter[ForkReason]]:
    """The row of each step, the last step of each row, and how many rows were opened beside a trajectory's first."""
    if _continues_always(columns, bases, trajectory_of_S):
        return trajectory_of_S.copy(), offsets(np.bincount(trajectory_of_S))[1:] - 1, Counter()
    builder, forks = _RowBuilder(columns, bases), Counter[ForkReason]()
    trajectory, first_row, row_of_S = -1, 0, []
    for step, of_step in enumerate(trajectory_of_S.tolist()):
        rows = len(builder.steps_of_R)
        if of_step != trajectory:
            trajectory, first_row = of_step, rows
        row = builder.find(step)
        if row is not None:
            builder.extend(row, step)
        else:
            if rows > first_row:
                forks[builder.fork_reason(step, range(first_row, rows))] += 1
            builder.open(step)
        row_of_S.append(rows if row is None else row)
    last_of_R = [steps[-1] for steps in builder.steps_of_R]
    return np.array(row_of_S, np.int64), np.array(last_of_R, np.int64), forks


def _continues_always(columns: Columns, bases: PrefixLinks, trajectory_of_S: IndexArray) -> bool:
    """Does every step that is not the first of its trajectory begin with all tokens of the one before it, and add some?
    Then each trajectory is one row."""
    base_S, shared_S, lengths_S = bases.base_S, bases.shared_S, columns.lengths_S
    is_first_S = is_first(trajectory_of_S)
    if not np.array_equal(base_S == NO_BASE, is_first_S):
        return False
    continues_S = (base_S[1:] == np.arange(len(base_S) - 1)) & (shared_S[1:] == lengths_S[:-1])
    continues_S &= (shared_S[1:] <= columns.prompt_lengths_S[1:]) & (shared_S[1:] < lengths_S[1:])
    return bool((continues_S | is_first_S[1:]).all())


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
