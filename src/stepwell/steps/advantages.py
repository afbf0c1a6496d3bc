"""How much better a rollout did than the others of its group, or a step than the same step of the others.

- An advantage does not depend on how many rows a rollout has.
- The advantages of a group's rollouts sum to 0.
- Without step rewards all kinds of advantages are equal.
- A rollout that no one has scored has none (NaN) and does not change those of the others.
"""

from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.layout import IndexArray

AdvantageKind: TypeAlias = Literal["rollout", "step", "reward_to_go"]
Floats: TypeAlias = NDArray[np.float64]
EPSILON = 1e-4
ROUNDING = 1e-9
"""Smaller differences between rewards come from their summation and count as none."""


def group_advantages(returns_T: Floats, group_of_T: IndexArray, epsilon: float = EPSILON) -> Floats:
    """GRPO's advantages: (return - mean of the group) / (standard deviation with n - 1 + epsilon).

    If all returns of a group are equal, or one rollout alone is scored, all advantages are 0.
    """
    centred_T = _centred(returns_T, group_of_T)
    return centred_T / (_deviations(centred_T, group_of_T)[group_of_T] + epsilon)


def step_advantages(
    kind: AdvantageKind,
    returns_T: Floats,
    outcomes_T: Floats,
    rewards_S: Floats,
    trajectory_of_S: IndexArray,
    group_of_T: IndexArray,
    places_S: NDArray[np.signedinteger],
) -> Floats:
    """The advantage of each step, which has a reward of its own or 0, and a place in its trajectory.

    - rollout: that of the rollout.
    - step: of all step rewards, only the step's own one counts.
    - reward_to_go: its own one and those of later steps count, because a step does not change what was before it.

    The step rewards that count are compared with those of the group's steps at the same place, and the outcome reward
    with that of the group's rollouts. What a return has beyond them (an older file does not tell the steps that are
    left out) counts as the rewards of later steps. The difference is divided as in GRPO, by the deviation of the
    returns; if they are equal, by the root mean square of the group's differences.

    Steps may be in any order, and a rollout may have none.
    """
    if kind not in get_args(AdvantageKind):
        raise BadRequest(f"advantage is one of {', '.join(get_args(AdvantageKind))}, not {kind!r}")
    if kind == "rollout":
        return group_advantages(returns_T, group_of_T)[trajectory_of_S]
    is_unscored_T = np.isnan(returns_T)
    common_T, counted_S = outcomes_T, rewards_S
    if kind == "reward_to_go":
        total_T = np.bincount(trajectory_of_S, rewards_S, len(returns_T))
        common_T, counted_S = returns_T - total_T, _rewards_to_go(rewards_S, trajectory_of_S, places_S)
    common_T = np.where(is_unscored_T, np.nan, common_T)
    counted_S = np.where(is_unscored_T[trajectory_of_S], np.nan, counted_S)
    group_of_S = group_of_T[trajectory_of_S]
    _, place_of_S = np.unique(np.stack([group_of_S, places_S], axis=1), axis=0, return_inverse=True)
    centred_S = _centred(common_T, group_of_T)[trajectory_of_S] + _centred(counted_S, place_of_S.ravel())
    scale_G = _deviations(_centred(returns_T, group_of_T), group_of_T)
    known_S = ~np.isnan(centred_S)
    squares_G = np.bincount(group_of_S[known_S], centred_S[known_S] ** 2, len(scale_G))
    steps_G = np.bincount(group_of_S[known_S], minlength=len(scale_G))
    scale_G = np.where(scale_G > 0, scale_G, np.sqrt(squares_G / np.maximum(steps_G, 1)))
    return centred_S / (scale_G[group_of_S] + EPSILON)


def _rewards_to_go(rewards_S: Floats, trajectory_of_S: IndexArray, places_S: NDArray[np.signedinteger]) -> Floats:
    """The reward of each step and of all later steps of its trajectory."""
    last_first = np.lexsort((-places_S, trajectory_of_S))
    sums = np.cumsum(rewards_S[last_first])
    _, starts, parts = np.unique(trajectory_of_S[last_first], return_index=True, return_inverse=True)
    before = np.concatenate([[0.0], sums])[starts]
    to_go_S = np.empty(len(rewards_S), np.float64)
    to_go_S[last_first] = sums - before[parts.ravel()]
    return to_go_S


def _centred(values: Floats, part_of: IndexArray) -> Floats:
    """Each value minus the mean of its part. NaN does not count."""
    known = ~np.isnan(values)
    counts = np.bincount(part_of[known], minlength=_count(part_of))
    means = np.bincount(part_of[known], values[known], len(counts)) / np.maximum(counts, 1)
    centred = values - means[part_of]
    return np.where(np.abs(centred) <= ROUNDING * np.maximum(1.0, np.abs(values)), 0.0, centred)


def _deviations(centred: Floats, part_of: IndexArray) -> Floats:
    """The standard deviation of each part, with n - 1; 0 for a part with one value or none."""
    known = ~np.isnan(centred)
    counts = np.bincount(part_of[known], minlength=_count(part_of))
    return np.sqrt(np.bincount(part_of[known], centred[known] ** 2, len(counts)) / np.maximum(counts - 1, 1))


def _count(part_of: IndexArray) -> int:
    return int(part_of.max(initial=-1)) + 1
