"""Which trajectories are exported."""

from typing import Any

import pytest

from stepwell.exports.selection import Selection, snapshot_of_stored
from stepwell.pool.api.watching import TrajectoryState
from stepwell.steps.step import Exactness, VersionSpan
from tests.unit.exports.stored import stored, summary, turns


@pytest.mark.parametrize(
    ("filters", "fits", "fits_not"),
    [
        ({"channel": "validation"}, {"channel": "validation"}, {"channel": "train"}),
        ({"source": "maths"}, {"source": "maths"}, {"source": ""}),
        ({"state": TrajectoryState.READY}, {"state": TrajectoryState.READY}, {"state": TrajectoryState.OPEN}),
        ({"mark": "good"}, {"marks": ("fine", "good")}, {"marks": ("fine",)}),
        ({"min_exactness": Exactness.SUBMITTED}, {"exactness": "engine"}, {"exactness": "retokenized"}),
        ({"min_exactness": Exactness.RETOKENIZED}, {"exactness": "retokenized"}, {"exactness": ""}),
        ({"reward_min": 0.5}, {"reward": 0.5}, {"reward": 0.4}),
        ({"reward_max": 0.5}, {"reward": 0.5}, {"reward": 0.6}),
        ({"reward_min": -1.0}, {"reward": -1.0}, {"reward": None}),
        ({"version_min": 3}, {"oldest_version": 1, "newest_version": 3}, {"oldest_version": 1, "newest_version": 2}),
        ({"version_max": 3}, {"oldest_version": 3, "newest_version": 5}, {"oldest_version": 4, "newest_version": 5}),
        ({"version_min": 3}, {"newest_version": 3}, {"newest_version": None}),
        ({"since": 10.0}, {"started_at": 10.0}, {"started_at": 9.0}),
        ({"until": 10.0}, {"started_at": 10.0}, {"started_at": 11.0}),
    ],
)
def test_a_filter_takes_what_it_names(filters: Any, fits: Any, fits_not: Any) -> None:
    assert Selection(**filters).accepts(summary("t", **fits))
    assert not Selection(**filters).accepts(summary("t", **fits_not))


def test_filters_are_combined() -> None:
    selection = Selection(channel="train", reward_min=1.0)
    assert selection.accepts(summary("t", reward=1.0))
    assert not selection.accepts(summary("t", reward=0.0))
    assert not selection.accepts(summary("t", reward=1.0, channel="validation"))


def test_what_was_rejected_is_not_taken_nor_what_will_be_dropped_when_it_comes_back() -> None:
    assert not Selection().accepts(summary("t", state=TrajectoryState.DROPPED, cause="rejected"))
    assert not Selection().accepts(summary("t", state=TrajectoryState.LEASED, note="by ann: wrong"))
    assert Selection().accepts(summary("t", state=TrajectoryState.LEASED))


def test_a_stored_trajectory_is_judged_by_all_its_steps() -> None:
    steps = turns("t", 3, started_at=7.0, metadata={"marks": ["good"]})
    spans = (VersionSpan(1, 0, 1), VersionSpan(9, 1, 2))
    first = turns("t", 1, reward=0.25, version_spans=spans, exactness=Exactness.RETOKENIZED, started_at=5.0)
    group = stored([*first, *steps[1:]], source="maths")
    found = snapshot_of_stored(group.columns, group)
    assert (found.reward, found.oldest_version, found.newest_version) == (0.25, 0, 9)
    assert (found.exactness, found.marks, found.started_at) == ("retokenized", ("good",), 5.0)
    assert (found.channel, found.source, found.steps) == ("train", "maths", 3)


def test_a_step_with_spans_has_the_versions_of_its_spans_alone() -> None:
    group = stored(turns("t", policy_version=1, version_spans=(VersionSpan(4, 0, 2),)))
    assert snapshot_of_stored(group.columns, group).oldest_version == 4


def test_of_a_group_the_trajectories_that_fit_are_taken() -> None:
    group = stored(turns("a", 2, reward=1.0), turns("b", 2, reward=0.0), turns("c", 1, reward=3.0))
    taken = Selection(reward_min=1.5).of_group(group)
    assert taken is not None
    assert taken.columns.trajectory_uids == ["a", "a", "c"]
    assert Selection(reward_min=5).of_group(group) is None
    assert Selection().of_group(group) is group
