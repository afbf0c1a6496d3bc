"""Rewards and returns of rollouts, also of those of which a batch has only a part, or nothing.

- A trajectory has an outcome reward and the rewards of its steps; together they form its return.
- In a batch and in a file, one step shows the outcome reward if it has no reward of its own: the last that is not
  marked untrainable, because a side call must not earn the reward of the task. `take_apart` tells the two apart.
- Advantages are computed as if nothing were left out. Otherwise a group's baseline would depend on a consumer's filter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.common.message_format import message
from stepwell.steps.columns import Columns
from stepwell.steps.layout import IndexArray, reward_carrier, run_lengths
from stepwell.steps.step import OF_STEP, OF_TRAJECTORY, IntArray, JsonObject, Step

Floats: TypeAlias = NDArray[np.float64]


@message
@dataclass(slots=True)
class GivenReward:
    value: float
    source: str = ""
    revision: int = 0


@dataclass(slots=True)
class TrajectoryRewards:
    """All rewards of one trajectory. May be changed before they are put together again."""

    of_steps: list[GivenReward | None]
    """The steps' own."""
    outcome: GivenReward | None
    carrier: int
    """The step that shows the outcome reward, if it has no reward of its own."""

    def total(self) -> float | None:
        given = [reward.value for reward in (*self.of_steps, self.outcome) if reward is not None]
        return math.fsum(given) if given else None

    def shown(self) -> list[GivenReward | None]:
        """The reward that each step shows."""
        shown = list(self.of_steps)
        shown[self.carrier] = shown[self.carrier] or self.outcome
        return shown


def take_apart(columns: Columns) -> TrajectoryRewards:
    """The rewards of a trajectory, all of whose steps these are. An older file does not tell the outcome reward: the
    reward of the step that would show it counts as such."""
    values = zip(columns.rewards_S.tolist(), columns.reward_sources, columns.reward_revisions_S.tolist(), strict=True)
    of_steps = [None if math.isnan(value) else GivenReward(value, source, n) for value, source, n in values]
    carrier = reward_carrier(columns.untrainable)
    total, outcome = float(columns.returns_S[0]), float(columns.outcomes_S[0])
    if OF_TRAJECTORY in columns.rewards_of:
        shown_at = columns.rewards_of.index(OF_TRAJECTORY)
        given, of_steps[shown_at] = of_steps[shown_at], None
        return TrajectoryRewards(of_steps, given, carrier)
    shown = None if OF_STEP in columns.rewards_of else of_steps[carrier]
    is_shown = math.isnan(total) or math.isclose(total, math.fsum(own.value for own in of_steps if own), abs_tol=1e-9)
    if shown is not None and is_shown and (math.isnan(total) or shown.value == outcome):
        of_steps[carrier] = None
        return TrajectoryRewards(of_steps, shown, carrier)
    newest = max((own.revision for own in of_steps if own), default=1)
    return TrajectoryRewards(of_steps, None if math.isnan(outcome) else GivenReward(outcome, "", newest), carrier)


def put_together(columns: Columns, rewards: TrajectoryRewards) -> Columns:
    """The same steps with these rewards."""
    shown, outcome = rewards.shown(), rewards.outcome
    return replace(
        columns,
        rewards_S=_numbers([None if reward is None else reward.value for reward in shown]),
        reward_sources=["" if reward is None else reward.source for reward in shown],
        rewards_of=["" if reward is None else OF_TRAJECTORY if reward is outcome else OF_STEP for reward in shown],
        reward_revisions_S=np.array([0 if reward is None else reward.revision for reward in shown], np.int32),
        returns_S=_numbers([rewards.total()] * len(shown)),
        outcomes_S=_numbers([None if outcome is None else outcome.value] * len(shown)),
    )


def split_rewards(columns: Columns, trajectory_of_S: IndexArray) -> tuple[Floats, Floats]:
    """The outcome reward of each trajectory of a batch, and the own reward of each step; 0 if there is none.

    Not all steps of a trajectory need be there. In an older file, the reward of the step that would show the outcome
    reward counts as such.
    """
    own: list[float] = np.nan_to_num(columns.rewards_S).tolist()
    outcome_of, total_of = columns.outcomes_S.tolist(), columns.returns_S.tolist()
    outcomes: list[float] = []
    start = 0
    for size in run_lengths(trajectory_of_S.tolist()):
        told = columns.rewards_of[start : start + size]
        carrier = start + reward_carrier(columns.untrainable[start : start + size])
        shown, outcome, total = own[carrier], outcome_of[carrier], total_of[carrier]
        if any(told):
            outcomes.append(outcome)
            own[start : start + size] = [
                0.0 if of == OF_TRAJECTORY else reward
                for of, reward in zip(told, own[start : start + size], strict=True)
            ]
        else:
            is_own = math.isclose(total, math.fsum(own[start : start + size]) + outcome, abs_tol=1e-9)
            outcomes.append(shown if math.isnan(total) else outcome)
            if math.isnan(total) or (shown == outcome and not is_own):
                own[carrier] = 0.0
        start += size
    return np.nan_to_num(outcomes), np.array(own, np.float64)


def return_of(steps: Sequence[Step]) -> float | None:
    """The return of their trajectory; in an older file the sum of their rewards; None if there is no reward."""
    known = next((step.trajectory_return for step in steps if step.trajectory_return is not None), None)
    rewards = [step.reward for step in steps if step.reward is not None]
    return known if known is not None else math.fsum(rewards) if rewards else None


def _numbers(values: Sequence[float | None]) -> Floats:
    return np.array(values, np.float64)


# -- what is left out of a batch ---------------------------------------------------------------------------------------

NO_STEP = -1
"""The step_index of the entry of a rollout that has no step at all."""


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
        uids = [self.trajectory_uids[entry] for entry in at.tolist()]
        return LeftOutSteps(
            trajectory_uids=uids, **{name: getattr(self, name)[at] for name in ("group_of_E", *NUMBERS)}
        )

    def of_group(self, group: int) -> JsonObject:
        """The entries of one group as JSON; empty if there are none."""
        part = self.chosen(np.flatnonzero(self.group_of_E == group))
        entries: dict[str, Any] = {"trajectory_uids": part.trajectory_uids}
        entries |= {name.removesuffix("_E"): _as_json(getattr(part, name)) for name in NUMBERS}
        return entries if len(part) else {}


NUMBERS: Mapping[str, type[np.generic]] = {
    "step_indexes_E": np.int32,
    "rewards_E": np.float64,
    "returns_E": np.float64,
    "outcomes_E": np.float64,
}
"""The fields with numbers of an entry, which JSON has without the suffix."""
NOTHING_LEFT_OUT = LeftOutSteps()


def left_out_of_groups(groups: Sequence[Mapping[str, Any]]) -> LeftOutSteps:
    """The entries of groups as `of_group` gives them."""
    return join_left_out(
        [
            LeftOutSteps(
                group_of_E=np.zeros(len(entries["trajectory_uids"]), np.int64),
                trajectory_uids=list(entries["trajectory_uids"]),
                **{name: np.array(entries[name.removesuffix("_E")], dtype) for name, dtype in NUMBERS.items()},
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
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in NUMBERS},
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
