"""How much better a rollout did than the others of its group.

- An advantage belongs to a rollout. It does not depend on how many steps or rows the rollout has.
- The advantages of a group sum to 0.
- A rollout that no one has scored has none (NaN) and does not change those of the others.
"""

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.layout import IndexArray

EPSILON = 1e-4


def group_advantages(
    rewards_T: NDArray[np.float64], group_of_T: IndexArray, epsilon: float = EPSILON
) -> NDArray[np.float64]:
    """GRPO's advantages: (return - mean of the group) / (standard deviation with n - 1 + epsilon).

    If all returns of a group are equal, or one rollout alone is scored, all advantages are 0.
    """
    advantages_T = np.full(len(rewards_T), np.nan)
    scored_T = ~np.isnan(rewards_T)
    for group in np.unique(group_of_T[scored_T]):
        members = np.flatnonzero(scored_T & (group_of_T == group))
        rewards = rewards_T[members]
        if np.ptp(rewards) == 0.0:
            advantages_T[members] = 0.0
        else:
            advantages_T[members] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon)
    return advantages_T
