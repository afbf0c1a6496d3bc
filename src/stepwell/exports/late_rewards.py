"""Rewards that came when their trajectory had been handed out: an archive has them beside its groups, not in them.

What always holds: of the rewards of a trajectory or a step, the one with the highest revision counts.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from stepwell.steps.columns import Columns
from stepwell.steps.groups import StepGroup

if TYPE_CHECKING:
    import pyarrow

FOLDER = "_rewards"
"""Within an archive."""
FIELDS = ("trajectory_uid", "prompt_uid", "step_index", "value", "source", "revision")


class Late(NamedTuple):
    value: float
    source: str
    revision: int


class LateRewards:
    def __init__(self, tables: "Iterable[pyarrow.Table]") -> None:
        self._last: dict[tuple[str, str], dict[int | None, Late]] = {}
        """By trajectory_uid and prompt_uid; then by step_index, None for the rollout's."""
        for table in tables:
            for row in zip(*(table[name].to_pylist() for name in FIELDS), strict=True):
                self._put(*row)

    def __bool__(self) -> bool:
        return bool(self._last)

    def applied(self, group: StepGroup) -> StepGroup:
        names = set(zip(group.columns.trajectory_uids, group.columns.prompt_uids, strict=True))
        if self._last.keys().isdisjoint(names):
            return group
        return group.only([self._of_trajectory(columns) for columns in group.trajectories()])

    def _put(self, uid: str, prompt: str, step_index: int | None, value: float, source: str, revision: int) -> None:
        of_trajectory = self._last.setdefault((uid, prompt), {})
        if step_index not in of_trajectory or of_trajectory[step_index].revision < revision:
            of_trajectory[step_index] = Late(value, source, revision)

    def _of_trajectory(self, columns: Columns) -> Columns:
        found = self._last.get((columns.trajectory_uids[0], columns.prompt_uids[0]), {})
        values, revisions = columns.rewards_S.copy(), columns.reward_revisions_S.copy()
        sources, indexes = list(columns.reward_sources), columns.step_indexes_S.tolist()
        for step_index, late in found.items():
            row = (
                _carrier(columns) if step_index is None else indexes.index(step_index) if step_index in indexes else -1
            )
            if row >= 0 and late.revision > revisions[row]:
                values[row], revisions[row], sources[row] = late.value, late.revision, late.source
        return replace(columns, rewards_S=values, reward_revisions_S=revisions, reward_sources=sources)


def _carrier(columns: Columns) -> int:
    """The row on which a rollout's reward stands: the last that is not marked untrainable, or else the last."""
    rows = range(len(columns) - 1, -1, -1)
    return next((row for row in rows if columns.untrainable[row] is None), len(columns) - 1)
