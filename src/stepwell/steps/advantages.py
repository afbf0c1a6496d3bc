"""How much better a rollout did than the others of its group, or a step than the same step of the others.

- An advantage does not depend on how many rows a rollout has.
- Without step rewards all kinds of advantages are equal.
- A rollout that no one has scored has none (NaN) and does not change those of the others.

With what it is compared is the baseline (steps/advantages.py).
"""

from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.layout import IndexArray
from stepwell.steps.step import BoolArray

AdvantageKind: TypeAlias = Literal["rollout", "step", "reward_to_go"]


def group_advantages(returns_T: Floats, group_of_T: IndexArray, epsilon: float = EPSILON) -> Floats:
    """GRPO's advantages: (return - mean of the group) / (standard deviation with n - 1 + epsilon).

    The advantages of a group's rollouts sum to 0. If all returns of a group are equal, or one rollout alone is scored,
    all are 0.
    """
    differences = GroupBaseline().differences(compare_rollouts(returns_T, group_of_T))
    return differences.divided(by_std=True, epsilon=epsilon)


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
