"""The results of a batch's groups besides the steps in it: the rewards of steps that are left out, and the returns of
rollouts of which nothing is there.

Advantages are computed as if nothing were left out. Otherwise a group's baseline would depend on a consumer's filter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepwell.common.message_format import message
from stepwell.steps.layout import IndexArray
from stepwell.steps.step import IntArray, JsonObject

NO_STEP = -1
"""The step_index of the entry of a rollout that has no step at all."""
Floats = NDArray[np.float64]


@message
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeftOutSteps:
    """E entries: one for each step that is left out, and one for each rollout without any step."""

    group_of_E: IndexArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Counted from 0 in the batch."""
    trajectory_uids: list[str] = field(default_factory=list)
    step_indexes_E: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    rewards_E: Floats = field(default_factory=lambda: np.zeros(0, np.float64))
    """The step's own; NaN if it has none."""
    returns_E: Floats = field(default_factory=lambda: np.zeros(0, np.float64))
    """The return of the whole trajectory; NaN if there is no reward."""
    outcomes_E: Floats = field(default_factory=lambda: np.zeros(0, np.float64))

    def __len__(self) -> int:
        return len(self.trajectory_uids)

    def chosen(self, entries: Sequence[int] | IndexArray) -> "LeftOutSteps":
        at = np.asarray(entries, np.int64)
        return LeftOutSteps(
            group_of_E=self.group_of_E[at],
            trajectory_uids=[self.trajectory_uids[entry] for entry in at.tolist()],
            step_indexes_E=self.step_indexes_E[at],
            rewards_E=self.rewards_E[at],
            returns_E=self.returns_E[at],
            outcomes_E=self.outcomes_E[at],
        )

    def of_group(self, group: int) -> JsonObject:
        """The entries of one group as JSON; empty if there are none."""
        part = self.chosen(np.flatnonzero(self.group_of_E == group))
        if not len(part):
            return {}
        return {
            "trajectory_uids": part.trajectory_uids,
            "step_indexes": part.step_indexes_E.tolist(),
            "rewards": _as_json(part.rewards_E),
            "returns": _as_json(part.returns_E),
            "outcomes": _as_json(part.outcomes_E),
        }


NOTHING_LEFT_OUT = LeftOutSteps()


def left_out_of_groups(groups: Sequence[Mapping[str, Any]]) -> LeftOutSteps:
    """The entries of groups as `of_group` gives them."""
    return join_left_out(
        [
            LeftOutSteps(
                group_of_E=np.zeros(len(entries["trajectory_uids"]), np.int64),
                trajectory_uids=list(entries["trajectory_uids"]),
                step_indexes_E=np.array(entries["step_indexes"], np.int32),
                rewards_E=np.array(entries["rewards"], np.float64),
                returns_E=np.array(entries["returns"], np.float64),
                outcomes_E=np.array(entries["outcomes"], np.float64),
            )
            if entries
            else NOTHING_LEFT_OUT
            for entries in groups
        ],
        [1] * len(groups),
    )


def join_left_out(parts: Sequence[LeftOutSteps], groups: Sequence[int]) -> LeftOutSteps:
    """All entries of several batches in one. `groups` is the number of groups of each."""
    if not any(len(part) for part in parts):
        return NOTHING_LEFT_OUT
    firsts = np.cumsum([0, *groups])
    return LeftOutSteps(
        group_of_E=np.concatenate([part.group_of_E + first for part, first in zip(parts, firsts, strict=False)]),
        trajectory_uids=[uid for part in parts for uid in part.trajectory_uids],
        step_indexes_E=np.concatenate([part.step_indexes_E for part in parts]),
        rewards_E=np.concatenate([part.rewards_E for part in parts]),
        returns_E=np.concatenate([part.returns_E for part in parts]),
        outcomes_E=np.concatenate([part.outcomes_E for part in parts]),
    )


def reorder_groups(left_out: LeftOutSteps, order: Sequence[int]) -> LeftOutSteps:
    """The same entries, if group `order[n]` becomes group n."""
    places = np.empty(len(order), np.int64)
    places[np.asarray(order, np.int64)] = np.arange(len(order))
    return replace(left_out, group_of_E=places[left_out.group_of_E])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WholeGroups:
    """All rollouts of the groups. Those that the batch has come first, in its order; the others follow."""

    trajectory_of_E: IndexArray
    """The trajectory of each entry of what is left out."""
    group_of_T: IndexArray
    returns_T: Floats
    outcomes_T: Floats
    """The outcomes of rollouts of which nothing is in the batch; NaN for the others."""


def whole_groups(
    left_out: LeftOutSteps, uids_T: Sequence[str], group_of_T: IndexArray, returns_T: Floats
) -> WholeGroups:
    """`uids_T` and the rest describe the rollouts that the batch has."""
    if not len(left_out):
        unknown_T = np.full(len(returns_T), np.nan)
        return WholeGroups(
            trajectory_of_E=np.zeros(0, np.int64), group_of_T=group_of_T, returns_T=returns_T, outcomes_T=unknown_T
        )
    numbers = {named: number for number, named in enumerate(zip(group_of_T.tolist(), uids_T, strict=True))}
    firsts: list[int] = []
    trajectory_of_E: list[int] = []
    named_E = zip(left_out.group_of_E.tolist(), left_out.trajectory_uids, strict=True)
    for entry, named in enumerate(named_E):
        if named not in numbers:
            numbers[named] = len(numbers)
            firsts.append(entry)
        trajectory_of_E.append(numbers[named])
    others = left_out.chosen(firsts)
    return WholeGroups(
        trajectory_of_E=np.array(trajectory_of_E, np.int64),
        group_of_T=np.concatenate([group_of_T, others.group_of_E]),
        returns_T=np.concatenate([returns_T, others.returns_E]),
        outcomes_T=np.concatenate([np.full(len(returns_T), np.nan), others.outcomes_E]),
    )


def _as_json(values: Floats) -> list[float | None]:
    """JSON has no NaN."""
    return [None if value != value else value for value in values.tolist()]
