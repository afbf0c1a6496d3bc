"""The baselines with which a rollout or a step is compared: its group, the others of its group, the batch, the past, or
nothing.

- A value has two parts: what counts for all steps of its rollout, and what counts for the step alone. Each part is
  compared by itself, so the number of steps of a rollout does not change the mean of the first.
- The scale is the standard deviation of the rollouts' differences, with n - 1. A rollout whose steps differ counts with
  the largest of its differences, so a step's advantage cannot become large because returns happen to be equal.
- A value that is not known (NaN) changes nothing for the others.
- A rollout that is alone in its group gets the fallback, if its baseline needs others of the group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.advantages import ALL, NO_PAST, RunningStatistics
from stepwell.steps.layout import IndexArray
from stepwell.steps.step import BoolArray

BaselineKind: TypeAlias = Literal["group", "leave_one_out", "batch", "running", "none"]
Floats: TypeAlias = NDArray[np.float64]
EPSILON = 1e-4
ROUNDING = 1e-9
"""Smaller differences between rewards come from their summation and count as none."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BaselineInputs:
    """The values of T rollouts with S steps. Steps may be in any order, and a rollout may have none."""

    common_T: Floats
    """The value that counts for all steps of a rollout."""
    counted_S: Floats
    """The value that counts for the step besides."""
    trajectory_of_S: IndexArray
    group_of_T: IndexArray
    places_S: NDArray[np.signedinteger]
    """The place of each step in its rollout: its step_index."""
    keys_T: list[str]
    """The task of each rollout, by which the past is kept; empty without one."""
    is_new_T: BoolArray
    """Which rollouts were not trained before: only these change the statistics of the past."""
    past: RunningStatistics
    """The statistics of earlier batches."""

    def after(self) -> RunningStatistics:
        """The statistics of the past, with these rollouts."""
        return self.past.after(self.common_T, self.counted_S, self.trajectory_of_S, self.keys_T, self.is_new_T)


def compare_rollouts(returns_T: Floats, group_of_T: IndexArray) -> BaselineInputs:
    """Rollouts of which only the returns matter, each with one step."""
    count = len(returns_T)
    return BaselineInputs(
        common_T=returns_T,
        counted_S=np.zeros(count),
        trajectory_of_S=np.arange(count),
        group_of_T=group_of_T,
        places_S=np.zeros(count, np.int64),
        keys_T=[ALL] * count,
        is_new_T=np.ones(count, np.bool_),
        past=NO_PAST,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """How much better each step did than its baseline."""

    values_S: Floats
    scale_S: Floats | None
    """The scale by which they are divided; None if they never are."""

    def divided(self, *, by_std: bool, epsilon: float = EPSILON) -> Floats:
        return self.values_S / (self.scale_S + epsilon) if by_std and self.scale_S is not None else self.values_S


class Baseline(Protocol):
    def differences(self, compared: BaselineInputs) -> Differences: ...


class GroupBaseline:
    """GRPO: the mean of the group's rollouts, and of its steps at the same place."""

    def differences(self, compared: BaselineInputs) -> Differences:
        if not compared.counted_S.any():
            return _returns_within(compared, compared.group_of_T)
        return _within(compared, compared.group_of_T, _same_place(compared))


class LeaveOneOutBaseline:
    """RLOO: the mean of the others of the group, and of their steps at the same place. So a rollout is not part of its
    own baseline."""

    def differences(self, compared: BaselineInputs) -> Differences:
        scale_S = GroupBaseline().differences(compared).scale_S
        values_S = _minus_others(compared.common_T, compared.group_of_T)[compared.trajectory_of_S]
        if compared.counted_S.any():
            values_S = values_S + _minus_others(compared.counted_S, _same_place(compared))
        return Differences(values_S, scale_S)


class BatchBaseline:
    """REINFORCE++: the mean of all rollouts of the batch, and of all steps."""

    def differences(self, compared: BaselineInputs) -> Differences:
        return _within(compared, np.zeros_like(compared.group_of_T), np.zeros_like(compared.trajectory_of_S))


class RunningBaseline:
    """The mean of earlier batches. Only the deviation takes this batch into account: after few rewards, or many equal
    ones, that of the past is near 0. A task without a past has that of all tasks; a first batch has its own mean."""

    def differences(self, compared: BaselineInputs) -> Differences:
        past, after = compared.past, compared.after()
        entries_T = [past.find(key) or after.of_all for key in compared.keys_T]
        means_T = np.array([(entry.common, entry.counted) for entry in entries_T]).reshape(-1, 2)
        spreads_T = [after.find(key if key in past else ALL) or after.of_all for key in compared.keys_T]
        scale_T = np.array([entry.variance for entry in spreads_T]) ** 0.5
        common_T, counted_S = _rounded(compared.common_T, means_T[:, 0]), compared.counted_S
        of_S = compared.trajectory_of_S
        return Differences(common_T[of_S] + _rounded(counted_S, means_T[of_S, 1]), scale_T[of_S])


class NoBaseline:
    """REINFORCE: the values as they are."""

    def differences(self, compared: BaselineInputs) -> Differences:
        return Differences(compared.common_T[compared.trajectory_of_S] + compared.counted_S, None)


BASELINES: Mapping[BaselineKind, Baseline] = {
    "group": GroupBaseline(),
    "leave_one_out": LeaveOneOutBaseline(),
    "batch": BatchBaseline(),
    "running": RunningBaseline(),
    "none": NoBaseline(),
}
NEED_SIBLINGS: frozenset[BaselineKind] = frozenset({"group", "leave_one_out"})
"""The baselines that tell nothing of a rollout that is alone in its group."""
NO_FALLBACK: frozenset[BaselineKind] = NEED_SIBLINGS | {"none"}
"""The fallbacks under which a rollout that is alone in its group has the advantage 0."""


def single_groups(values_T: Floats, group_of_T: IndexArray) -> BoolArray:
    """Which groups have one scored rollout."""
    single_G: BoolArray = np.bincount(group_of_T[~np.isnan(values_T)], minlength=_count(group_of_T)) == 1
    return single_G


def baseline_advantages(
    compared: BaselineInputs, baseline: BaselineKind, fallback: BaselineKind, *, divide_by_std: bool
) -> Floats:
    """The advantage of each step."""
    for kind in (baseline, fallback):
        if kind not in BASELINES:
            raise BadRequest(f"a baseline is one of {', '.join(BASELINES)}, not {kind!r}")
    advantages_S = BASELINES[baseline].differences(compared).divided(by_std=divide_by_std)
    if baseline not in NEED_SIBLINGS or fallback in NO_FALLBACK:
        return advantages_S
    is_single_S = single_groups(compared.common_T, compared.group_of_T)[compared.group_of_T[compared.trajectory_of_S]]
    if not is_single_S.any():
        return advantages_S
    instead_S = BASELINES[fallback].differences(compared).divided(by_std=divide_by_std)
    return np.where(is_single_S, instead_S, advantages_S)


def _within(compared: BaselineInputs, part_of_T: IndexArray, part_of_S: IndexArray) -> Differences:
    """Compared with the rollouts and the steps of the same part."""
    trajectory_of_S = compared.trajectory_of_S
    common_T = _centred(compared.common_T, part_of_T)
    values_S = common_T[trajectory_of_S] + _centred(compared.counted_S, part_of_S)
    largest_T = np.full(len(common_T), -np.inf)
    known_S = ~np.isnan(values_S)
    np.maximum.at(largest_T, trajectory_of_S[known_S], np.abs(values_S[known_S]))
    largest_T = np.where(np.isneginf(largest_T), common_T, largest_T)
    return Differences(values_S, _deviations(largest_T, part_of_T)[part_of_T][trajectory_of_S])


def _same_place(compared: BaselineInputs) -> IndexArray:
    """The part of each step: the steps of its group that have the same place."""
    group_of_S = compared.group_of_T[compared.trajectory_of_S]
    _, part_of_S = np.unique(np.stack([group_of_S, compared.places_S], axis=1), axis=0, return_inverse=True)
    return part_of_S.ravel()


def _returns_within(compared: BaselineInputs, part_of_T: IndexArray) -> Differences:
    """The same where nothing counts for a step alone: all steps of a rollout differ equally."""
    common_T = _centred(compared.common_T, part_of_T)
    scale_T = _deviations(common_T, part_of_T)[part_of_T]
    return Differences(common_T[compared.trajectory_of_S], scale_T[compared.trajectory_of_S])


def _centred(values: Floats, part_of: IndexArray) -> Floats:
    """Each value minus the mean of its part. NaN does not count. A part is rounded as a whole: its sum stays 0."""
    known = ~np.isnan(values)
    counts = np.bincount(part_of[known], minlength=_count(part_of))
    means = np.bincount(part_of[known], values[known], len(counts)) / np.maximum(counts, 1)
    centred = values - means[part_of]
    differs = np.bincount(part_of[known], ~_is_rounding(centred, values)[known], len(counts)) > 0
    return np.where(differs[part_of] | ~known, centred, 0.0)


def _minus_others(values: Floats, part_of: IndexArray) -> Floats:
    """Each value minus the mean of the others of its part; 0 if it is alone."""
    counts = np.bincount(part_of[~np.isnan(values)], minlength=_count(part_of))
    return _centred(values, part_of) * (counts / np.maximum(counts - 1, 1))[part_of]


def _rounded(values: Floats, means: Floats) -> Floats:
    centred = values - means
    return np.where(_is_rounding(centred, values), 0.0, centred)


def _is_rounding(differences: Floats, values: Floats) -> BoolArray:
    is_small: BoolArray = ~(np.abs(differences) > ROUNDING * np.maximum(1.0, np.abs(values)))
    return is_small & ~np.isnan(values)


def _deviations(centred: Floats, part_of: IndexArray) -> Floats:
    """The standard deviation of each part, with n - 1; 0 for a part with one value or none."""
    known = ~np.isnan(centred)
    counts = np.bincount(part_of[known], minlength=_count(part_of))
    return np.sqrt(np.bincount(part_of[known], centred[known] ** 2, len(counts)) / np.maximum(counts - 1, 1))


def _count(part_of: IndexArray) -> int:
    return int(part_of.max(initial=-1)) + 1
