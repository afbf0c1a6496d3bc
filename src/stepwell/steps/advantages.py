"""How much better a rollout did than its baseline, or a step than the same step of others: the advantage.

- The baseline is the group, the others of the group, the batch, the past, or nothing (`BASELINES`).
- A value has two parts: what counts for all steps of its rollout, and what counts for the step alone. Each part is
  compared by itself, so an advantage depends neither on the number of rows of a rollout nor on that of its steps.
  Without step rewards all kinds of advantages are equal.
- The scale is the standard deviation of the rollouts' differences, with n - 1. A rollout whose steps differ counts with
  the largest of its differences, so a step's advantage cannot become large because returns happen to be equal.
- A rollout that no one has scored has no advantage (NaN), and changes nothing for the others.
- A rollout that is alone in its group gets the fallback, if its baseline needs others of the group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.layout import IndexArray
from stepwell.steps.step import BoolArray

AdvantageKind: TypeAlias = Literal["rollout", "step", "reward_to_go"]
BaselineKind: TypeAlias = Literal["group", "leave_one_out", "batch", "running", "none"]
Floats: TypeAlias = NDArray[np.float64]
EPSILON = 1e-4
ROUNDING = 1e-9
"""Smaller differences between rewards come from their summation and count as none."""
MEMORY = 100.0
"""Rollouts of a key after which a reward has 1/e of its first weight in the statistics of the past."""
ALL = ""
"""The key under which all rollouts count."""
MAX_KEYS = 10_000
"""Tasks that are remembered; those that were longest without a rollout are dropped."""


# -- the past ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunningEntry:
    weight: float = 0.0
    """The weight of all past rollouts together; at most 1."""
    common: float = 0.0
    """The mean of what counts for all steps of a rollout."""
    counted: float = 0.0
    """The mean of what counts for a step besides."""
    variance: float = 0.0
    """The variance of rollouts, each with the step of it that differs most."""

    def after(self, common_T: Floats, counted_S: Floats, trajectory_of_S: IndexArray) -> "RunningEntry":
        """The entry with these rollouts, all of the same weight. `trajectory_of_S` counts among them."""
        kept = float(np.exp(-len(common_T) / MEMORY))
        past = self.weight * kept
        total = past + (now := 1.0 - kept)  # means are divided by it, so the first rewards are not pulled towards 0
        common = (past * self.common + now * _mean(common_T)) / total
        of_steps = _mean(counted_S) if len(counted_S) else self.counted
        counted = (past * self.counted + now * of_steps) / total
        moved = self.common + self.counted - common - counted
        largest_T = np.abs(common_T - common)
        has_steps_T = np.bincount(trajectory_of_S, minlength=len(common_T)) > 0
        largest_T[has_steps_T] = 0.0
        np.maximum.at(largest_T, trajectory_of_S, np.abs(common_T[trajectory_of_S] + counted_S - common - counted))
        variance = (past * (self.variance + moved**2) + now * _mean(largest_T**2)) / total
        return RunningEntry(total, common, counted, variance)


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Exponentially weighted mean and deviation of rewards, over batches; the order within a batch does not count. They
    are never changed: `after` gives new ones, which count once their batch is trained."""

    entries: Mapping[str, RunningEntry] = field(default_factory=dict)
    """The entries by task, the one longest without a rollout first; ALL is that of all tasks."""

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    @property
    def of_all(self) -> RunningEntry:
        return self.entries.get(ALL, RunningEntry())

    def find(self, key: str) -> RunningEntry | None:
        """The entry of a task; of all tasks if it has no past; None if there is none at all."""
        return self.entries.get(key) or self.entries.get(ALL)

    def after(
        self,
        common_T: Floats,
        counted_S: Floats,
        trajectory_of_S: IndexArray,
        keys_T: Sequence[str],
        is_counted_T: BoolArray,
    ) -> "RunningStatistics":
        """The statistics with these rollouts; those that are not scored (NaN) or not to be counted change nothing."""
        entries = dict(self.entries)
        is_counted_T = is_counted_T & ~np.isnan(common_T)
        is_known_S = is_counted_T[trajectory_of_S] & ~np.isnan(counted_S)
        for key, of_key_T in _by_key(keys_T, is_counted_T):
            of_key_S = of_key_T[trajectory_of_S] & is_known_S
            numbers_T = np.cumsum(of_key_T) - 1
            past = entries.pop(key, RunningEntry())
            entries[key] = past.after(common_T[of_key_T], counted_S[of_key_S], numbers_T[trajectory_of_S[of_key_S]])
        while len(entries) > MAX_KEYS:
            entries.pop(next(iter(entries)))
        return RunningStatistics(entries)

    def as_numbers(self) -> dict[str, list[float]]:
        """The numbers for a checkpoint."""
        return {key: list(astuple(entry)) for key, entry in self.entries.items()}


NO_PAST = RunningStatistics()


def statistics_of(numbers: Mapping[str, Sequence[float]]) -> RunningStatistics:
    """The statistics in a checkpoint."""
    return RunningStatistics({key: RunningEntry(*values) for key, values in numbers.items()})


def _by_key(keys_T: Sequence[str], is_counted_T: BoolArray) -> Iterator[tuple[str, BoolArray]]:
    """Which rollouts count for each key: the tasks, then all."""
    if not is_counted_T.any():
        return
    if any(keys_T):
        of_T = np.array(keys_T, object)
        for key in dict.fromkeys(of_T[is_counted_T].tolist()):
            if key != ALL:
                yield key, is_counted_T & (of_T == key)
    yield ALL, is_counted_T


# -- what is compared --------------------------------------------------------------------------------------------------


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


def compare_steps(
    kind: AdvantageKind,
    returns_T: Floats,
    outcomes_T: Floats,
    rewards_S: Floats,
    trajectory_of_S: IndexArray,
    group_of_T: IndexArray,
    places_S: NDArray[np.signedinteger],
    *,
    keys_T: list[str] | None = None,
    is_new_T: BoolArray | None = None,
    past: RunningStatistics = NO_PAST,
) -> BaselineInputs:
    """The values that count for each step, which has a reward of its own or 0, and a place in its trajectory.

    - rollout: the return.
    - step: the outcome reward, and of all step rewards only the step's own one.
    - reward_to_go: its own one and those of later steps count, because a step does not change what was before it.

    What a return has beyond the rewards that are given here (an older file does not tell the steps that are left out)
    counts as the rewards of later steps.
    """
    if kind not in get_args(AdvantageKind):
        raise BadRequest(f"advantage is one of {', '.join(get_args(AdvantageKind))}, not {kind!r}")
    common_T, counted_S = returns_T, np.zeros(len(rewards_S))
    if kind == "step":
        common_T, counted_S = outcomes_T, rewards_S
    if kind == "reward_to_go":
        total_T = np.bincount(trajectory_of_S, rewards_S, len(returns_T))
        common_T, counted_S = returns_T - total_T, _rewards_to_go(rewards_S, trajectory_of_S, places_S)
    is_unscored_T = np.isnan(returns_T)
    return BaselineInputs(
        common_T=np.where(is_unscored_T, np.nan, common_T),
        counted_S=np.where(is_unscored_T[trajectory_of_S], np.nan, counted_S),
        trajectory_of_S=trajectory_of_S,
        group_of_T=group_of_T,
        places_S=places_S,
        keys_T=[ALL] * len(returns_T) if keys_T is None else keys_T,
        is_new_T=np.ones(len(returns_T), np.bool_) if is_new_T is None else is_new_T,
        past=past,
    )


def _rewards_to_go(rewards_S: Floats, trajectory_of_S: IndexArray, places_S: NDArray[np.signedinteger]) -> Floats:
    """The reward of each step and of all later steps of its trajectory."""
    last_first = np.lexsort((-places_S, trajectory_of_S))
    sums = np.cumsum(rewards_S[last_first])
    _, starts, parts = np.unique(trajectory_of_S[last_first], return_index=True, return_inverse=True)
    before = np.concatenate([[0.0], sums])[starts]
    to_go_S = np.empty(len(rewards_S), np.float64)
    to_go_S[last_first] = sums - before[parts.ravel()]
    return to_go_S


# -- the baselines -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """How much better each step did than its baseline."""

    values_S: Floats
    scale_S: Floats | None
    """The scale by which they are divided; None if they never are."""

    def divided(self, *, by_std: bool, epsilon: float = EPSILON) -> Floats:
        return self.values_S / (self.scale_S + epsilon) if by_std and self.scale_S is not None else self.values_S


def _from_group(compared: BaselineInputs) -> Differences:
    """GRPO: the mean of the group's rollouts, and of its steps at the same place."""
    if compared.counted_S.any():
        return _within(compared, compared.group_of_T, _same_place(compared))
    common_T = _centred(compared.common_T, compared.group_of_T)  # as above: all steps of a rollout differ equally
    scale_T = _deviations(common_T, compared.group_of_T)[compared.group_of_T]
    return Differences(common_T[compared.trajectory_of_S], scale_T[compared.trajectory_of_S])


def _from_others(compared: BaselineInputs) -> Differences:
    """RLOO: the mean of the others of the group, and of their steps at the same place. So a rollout is not part of its
    own baseline."""
    values_S = _minus_others(compared.common_T, compared.group_of_T)[compared.trajectory_of_S]
    if compared.counted_S.any():
        values_S = values_S + _minus_others(compared.counted_S, _same_place(compared))
    return Differences(values_S, _from_group(compared).scale_S)


def _from_batch(compared: BaselineInputs) -> Differences:
    """REINFORCE++: the mean of all rollouts of the batch, and of all steps."""
    return _within(compared, np.zeros_like(compared.group_of_T), np.zeros_like(compared.trajectory_of_S))


def _from_past(compared: BaselineInputs) -> Differences:
    """The mean of earlier batches. Only the deviation takes this batch into account: after few rewards, or many equal
    ones, that of the past is near 0. A task without a past has that of all tasks; a first batch has its own mean."""
    past, after = compared.past, compared.after()
    entries_T = [past.find(key) or after.of_all for key in compared.keys_T]
    means_T = np.array([(entry.common, entry.counted) for entry in entries_T]).reshape(-1, 2)
    spreads_T = [after.find(key if key in past else ALL) or after.of_all for key in compared.keys_T]
    scale_T = np.array([entry.variance for entry in spreads_T]) ** 0.5
    of_S = compared.trajectory_of_S
    common_T = _rounded(compared.common_T, means_T[:, 0])
    return Differences(common_T[of_S] + _rounded(compared.counted_S, means_T[of_S, 1]), scale_T[of_S])


def _from_nothing(compared: BaselineInputs) -> Differences:
    """REINFORCE: the values as they are."""
    return Differences(compared.common_T[compared.trajectory_of_S] + compared.counted_S, None)


BASELINES: Mapping[BaselineKind, Callable[[BaselineInputs], Differences]] = {
    "group": _from_group,
    "leave_one_out": _from_others,
    "batch": _from_batch,
    "running": _from_past,
    "none": _from_nothing,
}
NEED_SIBLINGS: frozenset[BaselineKind] = frozenset({"group", "leave_one_out"})
"""The baselines that tell nothing of a rollout that is alone in its group."""
NO_FALLBACK: frozenset[BaselineKind] = NEED_SIBLINGS | {"none"}
"""The fallbacks under which a rollout that is alone in its group has the advantage 0."""


def group_advantages(returns_T: Floats, group_of_T: IndexArray, epsilon: float = EPSILON) -> Floats:
    """GRPO's advantages: (return - mean of the group) / (standard deviation with n - 1 + epsilon).

    The advantages of a group's rollouts sum to 0. If all returns of a group are equal, or one rollout alone is scored,
    all are 0.
    """
    return _from_group(compare_rollouts(returns_T, group_of_T)).divided(by_std=True, epsilon=epsilon)


def baseline_advantages(
    compared: BaselineInputs, baseline: BaselineKind, fallback: BaselineKind, *, divide_by_std: bool
) -> Floats:
    """The advantage of each step."""
    for kind in (baseline, fallback):
        if kind not in BASELINES:
            raise BadRequest(f"a baseline is one of {', '.join(BASELINES)}, not {kind!r}")
    advantages_S = BASELINES[baseline](compared).divided(by_std=divide_by_std)
    if baseline not in NEED_SIBLINGS or fallback in NO_FALLBACK:
        return advantages_S
    is_single_S = single_groups(compared.common_T, compared.group_of_T)[compared.group_of_T[compared.trajectory_of_S]]
    if not is_single_S.any():
        return advantages_S
    return np.where(is_single_S, BASELINES[fallback](compared).divided(by_std=divide_by_std), advantages_S)


def single_groups(values_T: Floats, group_of_T: IndexArray) -> BoolArray:
    """Which groups have one scored rollout."""
    single_G: BoolArray = np.bincount(group_of_T[~np.isnan(values_T)], minlength=_count(group_of_T)) == 1
    return single_G


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


def _mean(values: Floats) -> float:
    return float(values.sum()) / len(values)


def _count(part_of: IndexArray) -> int:
    return int(part_of.max(initial=-1)) + 1
