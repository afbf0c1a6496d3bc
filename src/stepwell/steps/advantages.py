"""How much better a rollout went than the others of its group.

What always holds: an advantage belongs to a rollout, so it does not matter into how many steps or rows that is divided;
those of a group sum to 0; a rollout that no one has scored has none (NaN) and changes nothing for the others.
"""

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.layout import IndexArray

EPSILON = 1e-4


def group_advantages(
    rewards_T: NDArray[np.float64], group_of_T: IndexArray, *, epsilon: float = EPSILON
) -> NDArray[np.float64]:
    """(reward − the group's mean) / (its deviation + epsilon), the deviation with n − 1, as GRPO has it.

    In a group in which all earned the same, or which has one scored rollout only, there is nothing to learn: 0.
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
