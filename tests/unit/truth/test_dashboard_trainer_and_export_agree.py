"""T10: the dashboard shows the advantages that are trained, and filters versions as an export does."""

import numpy as np
import pytest

from stepwell.dashboard.index import Search, TrajectoryIndex
from stepwell.dashboard.views import group_view
from stepwell.exports.selection import Selection
from stepwell.pool.api.watching import Changes
from stepwell.steps.advantages import group_advantages
from tests.unit.exports.stored import summary

REWARDS = [
    ([1.0, 0.0, 0.0, 1.0], [0.866, -0.866, -0.866, 0.866]),
    ([3.0, 1.0], [0.707, -0.707]),
    ([0.5, 0.5, 0.5], [0.0, 0.0, 0.0]),
    ([1.0], [0.0]),
]
"""Returns of a group, and the advantages of GRPO with n - 1 in the denominator of the deviation, as in verl and TRL."""


@pytest.mark.parametrize(("rewards", "expected"), REWARDS)
def test_the_dashboards_advantages_are_those_that_are_trained(rewards: list[float], expected: list[float]) -> None:
    view = group_view([summary(f"t{n}", reward=reward) for n, reward in enumerate(rewards)], {})
    shown = [row.advantage for row in view.rows]
    trained = group_advantages(np.array(rewards), np.zeros(len(rewards), np.int64)).tolist()
    assert shown == trained == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("bounds", [(None, None), (2, None), (None, 2), (2, 3), (3, 2), (0, 9)])
def test_versions_overlap_as_on_the_dashboard(bounds: tuple[int | None, int | None]) -> None:
    spans = [(None, None), (0, 0), (0, 2), (0, 5), (2, 2), (3, 3), (3, 7), (4, 9)]
    snapshots = [
        summary(f"t{n}", oldest_version=oldest, newest_version=newest) for n, (oldest, newest) in enumerate(spans)
    ]
    index = TrajectoryIndex()
    index.apply(Changes(snapshots=snapshots, cursors={}, reset_shards=(), more=False))
    shown = index.find(Search(version_min=bounds[0], version_max=bounds[1]))
    selection = Selection(version_min=bounds[0], version_max=bounds[1])
    assert {one.trajectory_uid for one in shown.rows} == {
        one.trajectory_uid for one in snapshots if selection.accepts(one)
    }
