"""Which rows of a batch are trained, towards what, and in which passes.

- A group is left out if it was trained before, or if no advantage in it differs from 0.
- A group of one has the fallback baseline.
- A rollout is left out if it is unscored, or, if the settings say so, if log-probabilities are missing or its last step
  did not come to its end.
- A missing log-probability is NaN until a trainer fills it in (trainers/learner.py): one that does not, fails.
- A step is left out if its temperature is not known, or not the one that is trained, or if its own advantages cannot
  be used.
- What is left out, here or by the pool, is counted. It does not change the advantages of the rest.
- An environment's own advantages take the place of those that are computed here; credit does not change them.
- All of it depends on the batch and on the statistics of earlier ones alone, which are in a checkpoint, so a resumed
  run makes the same passes.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.advantages import (
    NEED_SIBLINGS,
    NO_FALLBACK,
    NO_PAST,
    BaselineInputs,
    RunningStatistics,
    baseline_advantages,
)
from stepwell.steps.columns import Columns
from stepwell.steps.credit import credit_shares
from stepwell.steps.layout import IndexArray, firsts_of, in_parts_of, offsets, parts_of, sums
from stepwell.steps.padding import ones, spread
from stepwell.steps.rows import MergedRows
from stepwell.steps.step import CUT_SHORT, BoolArray, FloatArray
from stepwell.steps.trainable import SMALLEST_TEMPERATURE
from stepwell.trainers.algorithms import LossAggregation, token_weights
from stepwell.trainers.comparison import compare, whole_returns
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.settings import RowSettings, TrainingUnit

ZERO_ADVANTAGE = "set_advantage_to_zero"
"""The key of an environment's `overrides` by which a sequence is not trained towards anything."""
NO_END = frozenset({"length", CUT_SHORT})
"""The finish_reasons of steps that did not come to their end."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """Rows that go through the model together, padded on the right to L tokens; N tokens of them are trained."""

    ids_R_L: IndexArray
    attention_R_L: IndexArray
    trained_R_L: BoolArray
    recorded_N: FloatArray
    """The tokens' log-probabilities when they were sampled; NaN for those that are missing."""
    advantages_N: FloatArray
    temperatures_N: FloatArray
    weights_N: FloatArray
    """The weights of the tokens' losses in the loss of the batch."""
    sequences_N: IndexArray
    """The number of each token's rollout; of its step, if these are the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """How much of a batch's new groups is not trained, by reason."""

    groups_single: int
    """Groups with one scored rollout, which their baseline cannot compare with others."""
    groups_identical: int
    """Groups whose rollouts are the same, token for token: a fixed seed, or no sampling."""
    groups_equal: int
    """Other groups whose rollouts did equally well, or as well as their baseline."""
    rollouts_unscored: int
    rollouts_without_logprobs: int
    rollouts_overlong: int
    steps_other_temperature: int
    steps_unknown_temperature: int
    steps_unusable_advantages: int
    """Steps with advantages of their own that are not one number for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledIn:
    """The values that trained tokens lack, and how many of them were filled in."""

    logprobs_recomputed: int
    """Trained tokens without a recorded log-probability that have that of the weights that sampled them."""
    logprobs_current: int
    """Trained tokens without a recorded log-probability that have that of the weights before the update."""
    logprobs_staleness: float
    """The mean number of versions by which these weights are newer than those that sampled the tokens."""
    temperatures_assumed: int
    """New steps that do not tell their temperature and are taken for sampled at the assumed one."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedRows:
    merged: MergedRows
    """The rows. Their log-probabilities are NaN where one is missing and not filled in."""
    advantages: FloatArray
    """One for each token of all rows."""
    temperatures: FloatArray
    chosen_R: IndexArray
    """The trained rows, the shortest first."""
    trained: BoolArray
    """Which tokens of all rows are trained."""
    missing: BoolArray
    """The trained tokens that were recorded without a log-probability."""
    recomputed: BoolArray
    """The tokens among the missing ones that have one by the weights that sampled them."""
    temperatures_assumed: int
    uids_T: list[str]
    """The names of the rollouts; of the steps, if these are the unit."""
    is_new_T: BoolArray
    """Which rollouts were not trained before."""
    left_out: LeftOut
    reward: float
    """The mean return of the scored rollouts, also of those of which the batch has no step; NaN if there is none."""
    statistics: RunningStatistics
    """The statistics of the rewards up to this batch, for the next one."""

    @property
    def tokens(self) -> int:
        return int(self.trained.sum())

    @property
    def uids(self) -> tuple[str, ...]:
        """The rollouts that count as trained with this batch, including those left out because they teach nothing."""
        return tuple(uid for uid, is_new in zip(self.uids_T, self.is_new_T.tolist(), strict=True) if is_new)

    @property
    def groups_trained(self) -> int:
        return len(np.unique(self.merged.group_of_R[self.chosen_R]))

    def filled_in(self, version: int) -> FilledIn:
        """`version` is that of the weights before the update."""
        stale = self.versions_behind(version)[(self.missing & ~self.recomputed)[self.trained]]
        return FilledIn(
            logprobs_recomputed=int(self.recomputed.sum()),
            logprobs_current=len(stale),
            logprobs_staleness=float(stale.mean()) if len(stale) else 0.0,
            temperatures_assumed=self.temperatures_assumed,
        )

    def versions_behind(self, version: int) -> IndexArray:
        """The number of versions by which each trained token is older than the weights. If another process syncs the
        engines, `version` is too old; then the newest token tells the current version."""
        versions = self.merged.versions[self.trained]
        return max(version, int(versions.max(initial=version))) - versions

    def minibatches(self, count: int) -> "list[TrainedRows]":
        """The trained rollouts, dealt in turn, each with all of its rows. There are fewer minibatches if there are
        fewer rollouts."""
        if count == 1:
            return [self]
        trajectory_of_R, lengths_R = self.merged.trajectory_of_R, np.diff(self.merged.offsets_R)
        rollouts, parts = np.unique(trajectory_of_R[self.chosen_R]), []
        for first in range(min(count, len(rollouts))):
            is_dealt_R = np.isin(trajectory_of_R, rollouts[first::count])
            chosen_R, trained = (
                self.chosen_R[is_dealt_R[self.chosen_R]],
                self.trained & np.repeat(is_dealt_R, lengths_R),
            )
            parts.append(replace(self, chosen_R=chosen_R, trained=trained))
        return parts

    def passes(
        self, tokens: int, aggregation: LossAggregation = "token_mean", fixed_length: int = 1
    ) -> Iterator[MicroBatch]:
        """Yields as many rows at a time as fit into `tokens` with their padding, but at least one."""
        lengths_R = np.diff(self.merged.offsets_R)
        sequences = np.repeat(self.merged.trajectory_of_R, lengths_R)[self.trained]
        weights = np.zeros(len(self.trained), np.float32)
        weights[self.trained] = token_weights(aggregation, sequences, fixed_length)
        rows: list[int] = []
        for row in self.chosen_R.tolist():
            if rows and (len(rows) + 1) * lengths_R[row] > tokens:
                yield self._pass(np.array(rows), weights)
                rows = []
            rows.append(row)
        if rows:
            yield self._pass(np.array(rows), weights)

    def _pass(self, rows: IndexArray, weights: FloatArray) -> MicroBatch:
        merged = self.merged
        at, lengths = merged.offsets_R[rows], np.diff(merged.offsets_R)[rows]
        shape = (len(rows), int(lengths.max()))
        trained_R_L = spread(self.trained, at, lengths, np.zeros(shape, np.bool_))

        def of_trained(flat: FloatArray) -> FloatArray:
            return spread(flat, at, lengths, np.zeros(shape, np.float32))[trained_R_L]

        return MicroBatch(
            ids_R_L=spread(merged.tokens, at, lengths, np.zeros(shape, np.int64)),
            attention_R_L=ones(np.zeros_like(lengths), lengths, shape[1]),
            trained_R_L=trained_R_L,
            recorded_N=of_trained(merged.logprobs),
            advantages_N=of_trained(self.advantages),
            temperatures_N=of_trained(self.temperatures),
            weights_N=of_trained(weights),
            sequences_N=np.repeat(merged.trajectory_of_R[rows], trained_R_L.sum(axis=1)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usable:
    """Which rollouts and steps of a batch can be trained."""

    trajectory_of_S: IndexArray
    is_new_T: BoolArray
    lacks_logprobs_T: BoolArray
    is_overlong_T: BoolArray
    is_other_S: BoolArray
    """Steps whose temperature is another one."""
    is_unknown_S: BoolArray
    """Steps that do not tell their temperature."""
    is_unusable_S: BoolArray
    """Steps whose own advantages cannot be used."""

    def wanted(self) -> BoolArray:
        wanted_T = self.is_new_T & ~self.lacks_logprobs_T & ~self.is_overlong_T
        wanted_S: BoolArray = wanted_T[self.trajectory_of_S] & ~self.is_unknown_S
        return wanted_S & ~self.is_other_S & ~self.is_unusable_S

    def left_out(self, groups: tuple[int, int, int], is_scored_T: BoolArray) -> LeftOut:
        """Counts what is left out of new rollouts. `groups` are those of which nothing can be learned: single,
        identical, equal."""
        single, identical, equal = groups
        is_new_T, is_new_S = self.is_new_T, self.is_new_T[self.trajectory_of_S]
        return LeftOut(
            groups_single=single,
            groups_identical=identical,
            groups_equal=equal,
            rollouts_unscored=int((is_new_T & ~is_scored_T[: len(is_new_T)]).sum()),
            rollouts_without_logprobs=int((is_new_T & self.lacks_logprobs_T).sum()),
            rollouts_overlong=int((is_new_T & self.is_overlong_T).sum()),
            steps_other_temperature=int((is_new_S & self.is_other_S).sum()),
            steps_unknown_temperature=int((is_new_S & self.is_unknown_S).sum()),
            steps_unusable_advantages=int((is_new_S & self.is_unusable_S).sum()),
        )


def choose_rows(
    batch: TrainingBatch,
    known: Container[str],
    settings: RowSettings | None = None,
    past: RunningStatistics = NO_PAST,
) -> TrainedRows:
    """`known` are the rollouts trained before: if their groups come back, they are not trained again. `past` are the
    statistics of earlier batches."""
    settings = settings or RowSettings()
    merged, columns, group_of_T = batch.merged(), batch.columns, batch.group_of_T
    trajectory_of_S, responses_S = batch.trajectory_of_S, columns.response_lengths_S
    uids_T = [_name(columns, step, settings.unit) for step in firsts_of(trajectory_of_S).tolist()]
    known_T = np.array([uid in known for uid in uids_T], np.bool_)
    is_new_T = ~in_parts_of(known_T, group_of_T)

    compared = compare(batch, settings, past, group_of_T[known_T])
    advantages = _response_advantages(batch, settings, compared)
    is_missing_token = is_missing(columns.logprobs)
    is_recorded = settings.old_logprobs == "recorded"
    temperatures_S, is_unknown_S, is_other_S = step_temperatures(columns, settings)
    usable = _Usable(
        trajectory_of_S=trajectory_of_S,
        is_new_T=is_new_T,
        lacks_logprobs_T=_lacking(batch, is_missing_token) if is_recorded else np.zeros_like(is_new_T),
        is_overlong_T=_overlong(batch, is_filtered=settings.filter_overlong),
        is_other_S=is_other_S,
        is_unknown_S=is_unknown_S,
        is_unusable_S=unusable_advantages(columns),
    )
    wanted_S = usable.wanted()
    wanted = columns.mask & np.repeat(wanted_S, responses_S) & ~np.isnan(advantages)
    advantages = np.nan_to_num(advantages)
    group_of = np.repeat(group_of_T[trajectory_of_S], responses_S)
    differs = columns.mask & (advantages != 0.0)
    trained = _trained(merged, wanted & in_parts_of(wanted & differs, group_of))
    missing = np.zeros(len(merged.tokens), np.bool_)
    missing[merged.places] = is_missing_token
    missing &= trained

    lengths_R = np.diff(merged.offsets_R)
    has_some_R = np.bincount(parts_of(lengths_R), trained, len(lengths_R)) > 0
    shortest_first = np.argsort(lengths_R, kind="stable")
    differs_G: BoolArray = np.bincount(group_of, differs, len(group_of_T)) > 0
    is_equal_T = ~differs_G[group_of_T]
    groups = _unlearnable_groups(batch, merged, compared, is_new_T & is_equal_T, settings)
    return TrainedRows(
        merged=replace(merged, logprobs=np.where(missing, np.float32(np.nan), merged.logprobs)),
        advantages=place_responses(merged, advantages),
        temperatures=place_responses(merged, np.repeat(temperatures_S, responses_S), filler=1.0),
        chosen_R=shortest_first[has_some_R[shortest_first]],
        trained=trained,
        missing=missing,
        recomputed=np.zeros_like(missing),
        temperatures_assumed=int((np.isnan(columns.temperatures_S) & wanted_S).sum()),
        uids_T=uids_T,
        is_new_T=is_new_T,
        left_out=usable.left_out(groups, ~np.isnan(compared.common_T)),
        reward=_mean(whole_returns(batch, settings)),
        statistics=compared.after(),
    )


def _trained(merged: MergedRows, wanted: BoolArray) -> BoolArray:
    """Which tokens of the rows are trained, given which response tokens are wanted."""
    trained = np.zeros(len(merged.tokens), np.bool_)
    trained[merged.places] = wanted
    trained[merged.offsets_R[:-1][np.diff(merged.offsets_R) > 0]] = False  # a row's first token follows nothing
    return trained


def response_advantages(
    batch: TrainingBatch, settings: RowSettings, past: RunningStatistics = NO_PAST
) -> NDArray[np.float64]:
    """The advantage of each response token, in the order of the batch's columns; NaN for an unscored rollout, and for a
    step whose own advantages cannot be used."""
    return _response_advantages(batch, settings, compare(batch, settings, past))


def _response_advantages(batch: TrainingBatch, settings: RowSettings, compared: BaselineInputs) -> NDArray[np.float64]:
    shares_S = credit_shares(settings.credit, batch.columns, batch.trajectory_of_S)
    advantages_S = baseline_advantages(
        compared, settings.baseline, settings.fallback_baseline, divide_by_std=settings.divide_by_std
    )[: len(batch.columns)]
    advantages = np.repeat(shares_S * advantages_S, batch.columns.response_lengths_S)
    starts = offsets(batch.columns.response_lengths_S).tolist()
    for step, own in _own_advantages(batch.columns):
        advantages[starts[step] : starts[step + 1]] = np.nan if own is None else own
    return advantages


def unusable_advantages(columns: Columns) -> BoolArray:
    """Which steps have advantages of their own that are not one number for each token."""
    unusable_S = np.zeros(len(columns), np.bool_)
    unusable_S[[step for step, own in _own_advantages(columns) if own is None]] = True
    return unusable_S


def _own_advantages(columns: Columns) -> Iterator[tuple[int, NDArray[np.float64] | None]]:
    """The steps with advantages of their own, and those of their responses; None if they cannot be used."""
    for step, extras in enumerate(columns.extras):
        if not extras:
            continue
        response = int(columns.response_lengths_S[step])
        length = response + int(columns.prompt_lengths_S[step])
        own, overrides = extras.get("advantages"), extras.get("overrides")
        if isinstance(overrides, dict) and overrides.get(ZERO_ADVANTAGE):
            yield step, np.zeros(response)
        elif own is not None and own != []:
            yield step, _read_advantages(own, response, length)


def _read_advantages(own: object, response: int, length: int) -> NDArray[np.float64] | None:
    """The advantages of the response, from one number for each token of the step or of its response; None if they
    cannot be used."""
    if not isinstance(own, list) or len(own) not in (response, length):
        return None
    try:
        values = np.array(own, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return values[len(values) - response :] if np.isfinite(values).all() else None


def _name(columns: Columns, step: int, unit: TrainingUnit) -> str:
    """The name by which a rollout is known once it is trained, or a step if it is trained by itself."""
    trajectory_uid = columns.trajectory_uids[step]
    if unit != "steps":
        return trajectory_uid
    return f"{trajectory_uid}/{columns.uids[step] or columns.step_indexes_S[step]}"


def _mean(returns_T: NDArray[np.float64]) -> float:
    scored = returns_T[~np.isnan(returns_T)]
    return float(scored.mean()) if len(scored) else float("nan")


def place_responses(merged: MergedRows, values: NDArray[np.generic], filler: float = 0.0) -> FloatArray:
    """Values of response tokens among the tokens of the rows."""
    flat = np.full(len(merged.tokens), filler, np.float32)
    flat[merged.places] = values
    return flat


def step_temperatures(columns: Columns, settings: RowSettings) -> tuple[NDArray[np.float64], BoolArray, BoolArray]:
    """The temperature of each step, whether it is not known, and whether it is one that is not trained. One that is
    assumed and not trained is not known."""
    told_S = columns.temperatures_S
    assumed = settings.assumed_temperature
    temperatures_S = told_S if assumed is None else np.where(np.isnan(told_S), assumed, told_S)
    is_unknown_S = np.isnan(temperatures_S)
    is_other_S = ~is_unknown_S & (temperatures_S < SMALLEST_TEMPERATURE)
    if settings.temperature is not None and (temperatures_S != settings.temperature).any():
        is_other_S |= ~is_unknown_S & ~np.isclose(temperatures_S, settings.temperature)
    is_unknown_S |= is_other_S & np.isnan(told_S)
    return np.where(is_unknown_S, 1.0, temperatures_S), is_unknown_S, is_other_S & ~is_unknown_S


def is_missing(logprobs: FloatArray) -> BoolArray:
    """Environments send 1.0 for tokens that no policy wrote, and may train them all the same."""
    missing: BoolArray = np.isnan(logprobs) | (logprobs > 0.0)
    return missing


def _lacking(batch: TrainingBatch, is_missing_token: BoolArray) -> BoolArray:
    """Which rollouts have a token to train without a recorded log-probability."""
    columns = batch.columns
    missing_S = sums(is_missing_token & columns.mask, columns.response_lengths_S)
    lacking_T: BoolArray = np.bincount(batch.trajectory_of_S, missing_S, len(batch.group_of_T)) > 0
    return lacking_T


def came_to_no_end(columns: Columns) -> BoolArray:
    """Which steps reached their largest length, or were not read on by their agent."""
    return np.array([reason in NO_END for reason in columns.carried["finish_reasons"]], np.bool_)


def _overlong(batch: TrainingBatch, *, is_filtered: bool) -> BoolArray:
    """Which rollouts have a last step that did not come to its end; none if these are not filtered."""
    overlong_T = np.zeros(len(batch.group_of_T), np.bool_)
    if is_filtered:
        in_order = np.lexsort((batch.columns.step_indexes_S, batch.trajectory_of_S))
        overlong_T[batch.trajectory_of_S[in_order]] = came_to_no_end(batch.columns)[in_order]  # the last one stays
    return overlong_T


def _unlearnable_groups(
    batch: TrainingBatch,
    merged: MergedRows,
    compared: BaselineInputs,
    is_unlearnable_T: BoolArray,
    settings: RowSettings,
) -> tuple[int, int, int]:
    """How many groups have one scored rollout that is compared with nothing, how many have identical ones, and how many
    have other ones that are equal, or equal to their baseline."""
    if not is_unlearnable_T.any():
        return 0, 0, 0
    written = merged.tokens[merged.places]
    ends_T = offsets(np.bincount(batch.trajectory_of_S, batch.columns.response_lengths_S).astype(np.int64)).tolist()
    is_scored_T, present = ~np.isnan(compared.common_T), len(batch.group_of_T)
    others = compared.group_of_T[present:][is_scored_T[present:]]
    has_fallback = settings.baseline not in NEED_SIBLINGS or settings.fallback_baseline not in NO_FALLBACK
    single = identical = equal = 0
    for group in np.unique(batch.group_of_T[is_unlearnable_T]).tolist():
        scored = np.flatnonzero((batch.group_of_T == group) & is_scored_T[:present]).tolist()
        answers = {written[ends_T[t] : ends_T[t + 1]].tobytes() for t in scored}
        without_answer = int((others == group).sum())
        rollouts = len(scored) + without_answer
        single += rollouts == 1 and not has_fallback
        identical += rollouts > 1 == len(answers) + without_answer
        equal += len(answers) + without_answer > 1 or rollouts == 1 == has_fallback
    return single, identical, equal
