import time
from typing import Any

import pytest

from stepwell.dashboard.index.search import Search
from stepwell.dashboard.index.trajectories import Found, Index
from stepwell.pool.api.watching import TrajectoryState
from tests.rig.sight_rollouts import summary_of
from tests.unit.dashboard.summaries import make_summary, told


def uids(found: Found) -> list[str]:
    return [row.trajectory_uid for row in found.rows]


@pytest.fixture
def index() -> Index:
    index = Index()
    index.apply(
        told(
            make_summary("a", "p", reward=1.0, tokens=5, oldest_version=1, newest_version=2, started_at=1),
            make_summary("b", "p", reward=0.0, tokens=9, marks=("odd", "nice"), started_at=2, source="sums"),
            make_summary(
                "c", "q", channel="validation", state=TrajectoryState.OPEN, tokens=7, started_at=3, marks=("odd",)
            ),
            make_summary("d", "q", state=TrajectoryState.DROPPED, cause="stale", exactness="submitted", started_at=4),
        )
    )
    return index


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, "dcba"),
        ({"channel": "validation"}, "c"),
        ({"channel": "unheard of"}, ""),
        ({"state": "ready"}, "ba"),
        ({"cause": "stale"}, "d"),
        ({"source": "sums"}, "b"),
        ({"exactness": "submitted"}, "d"),
        ({"mark": "odd"}, "cb"),
        ({"mark": "nice", "channel": "train"}, "b"),
        ({"mark": "unheard of"}, ""),
        ({"reward_min": 0.5}, "a"),
        ({"reward_max": 0.5}, "b"),
        ({"version_min": 2}, "a"),
        ({"version_min": 3}, ""),
        ({"version_max": 1}, "a"),
        ({"version_max": 0}, ""),
        ({"prompt_uid": "q"}, "dc"),
        ({"uid": "b"}, "b"),
        ({"sort": "oldest"}, "abcd"),
        ({"sort": "reward"}, "bacd"),
        ({"sort": "-reward"}, "abdc"),
        ({"sort": "-tokens"}, "dbca"),
        ({"sort": "oldest", "offset": 1, "limit": 2}, "bc"),
    ],
)
def test_filters_and_orders(index: Index, filters: dict[str, Any], expected: str) -> None:
    assert uids(index.find(Search(**filters))) == list(expected)


def test_what_is_looked_for_among_some_is_found_among_them_alone(index: Index) -> None:
    found = index.find(Search(prompt_uid="p"), [("a", "p"), ("d", "q"), ("unheard of", "p")])
    assert uids(found) == ["a"]
    assert found.facets["state"] == {"ready": 1}
    assert index.find(Search(), []).matched == 0


def test_a_facet_counts_what_another_value_of_its_filter_would_give(index: Index) -> None:
    facets = index.find(Search(channel="train", state="ready")).facets
    assert facets["channel"] == {"train": 2}
    assert facets["state"] == {"ready": 2, "dropped": 1}
    assert facets["mark"] == {"odd": 1, "nice": 1}
    assert facets["cause"] == {}


def test_the_last_summary_counts_and_marks_go_with_it(index: Index) -> None:
    index.apply(told(make_summary("b", "p", state=TrajectoryState.TRAINED, started_at=2)))
    found = index.find(Search(state="trained"))
    assert (found.total, uids(found)) == (4, ["b"])
    assert index.find(Search(mark="nice")).matched == 0
    assert index.find(Search()).facets["mark"] == {"odd": 1}


def test_a_shard_that_is_read_anew_loses_what_was_known_of_it(index: Index) -> None:
    index.apply(told(make_summary("e", "r", shard="other")))
    left = index.apply(told(make_summary("a", "p"), anew=("pool",)))
    assert sorted(left) == [("b", "p"), ("c", "q"), ("d", "q")]
    assert sorted(uids(index.find(Search()))) == ["a", "e"]


def test_of_what_is_gone_only_the_last_are_kept_and_their_places_are_used_again() -> None:
    index = Index(gone_kept=2)
    index.apply(told(make_summary("held", "p")))
    for number in range(5):
        left = index.apply(told(make_summary(f"gone-{number}", "p", state=TrajectoryState.TRAINED, started_at=number)))
    assert left == [("gone-2", "p")]
    assert sorted(uids(index.find(Search()))) == ["gone-3", "gone-4", "held"]
    assert index.find(Search()).total == 3


def test_a_group_is_that_of_the_name_or_the_prompts_last() -> None:
    index = Index()
    index.apply(told(*(make_summary(f"t{n}", "p", group=n // 2) for n in range(4)), make_summary("x", "q", group=9)))
    assert [row.trajectory_uid for row in index.group("p", None, None)] == ["t2", "t3"]
    assert [row.trajectory_uid for row in index.group("p", 0, "pool")] == ["t0", "t1"]
    assert index.group("p", 0, "elsewhere") == []


def test_the_oldest_held_are_told_by_channel(index: Index) -> None:
    assert index.oldest_held() == {"train": 1.0, "validation": 3.0}
    assert Index().oldest_held() == {}


def test_a_hundred_thousand_are_searched_well_under_a_second() -> None:
    index = Index()
    for start in range(0, 100_000, 2_000):
        index.apply(told(*map(summary_of, range(start, start + 2_000))))
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        found = index.find(Search(channel="train", state="ready", reward_min=0.5, version_min=3, uid="7"))
        took.append(time.perf_counter() - begun)
    assert found.total == 100_000
    assert 0 < found.matched < 20_000
    assert min(took) < 0.5  # some 50 ms on an idle machine
