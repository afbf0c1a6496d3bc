import sys
from typing import Any

import pytest

from rig.made_up_rollouts import summary_of
from stepwell.dashboard.index import Search, SearchResult, TrajectoryIndex
from stepwell.pool.api.watching import TrajectoryState
from tests.unit.dashboard.summaries import make_summary, told


def uids(found: SearchResult) -> list[str]:
    return [row.trajectory_uid for row in found.rows]


@pytest.fixture
def index() -> TrajectoryIndex:
    index = TrajectoryIndex()
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
def test_filters_and_orders(index: TrajectoryIndex, filters: dict[str, Any], expected: str) -> None:
    assert uids(index.find(Search(**filters))) == list(expected)


def test_what_is_looked_for_among_some_is_found_among_them_alone(index: TrajectoryIndex) -> None:
    found = index.find(Search(prompt_uid="p"), [("a", "p"), ("d", "q"), ("unheard of", "p")])
    assert uids(found) == ["a"]
    assert found.facets["state"] == {"ready": 1}
    assert index.find(Search(), []).matched == 0


def test_a_facet_counts_what_another_value_of_its_filter_would_give(index: TrajectoryIndex) -> None:
    facets = index.find(Search(channel="train", state="ready")).facets
    assert facets["channel"] == {"train": 2}
    assert facets["state"] == {"ready": 2, "dropped": 1}
    assert facets["mark"] == {"odd": 1, "nice": 1}
    assert facets["cause"] == {}


def test_the_last_summary_counts_and_marks_go_with_it(index: TrajectoryIndex) -> None:
    index.apply(told(make_summary("b", "p", state=TrajectoryState.TRAINED, started_at=2)))
    found = index.find(Search(state="trained"))
    assert (found.total, uids(found)) == (4, ["b"])
    assert index.find(Search(mark="nice")).matched == 0
    assert index.find(Search()).facets["mark"] == {"odd": 1}


def test_a_shard_that_is_read_anew_loses_what_was_known_of_it(index: TrajectoryIndex) -> None:
    index.apply(told(make_summary("e", "r", shard="other")))
    left = index.apply(told(make_summary("a", "p"), anew=("pool",)))
    assert sorted(left) == [("b", "p"), ("c", "q"), ("d", "q")]
    assert sorted(uids(index.find(Search()))) == ["a", "e"]


def test_of_what_is_gone_only_the_last_are_kept_and_their_places_are_used_again() -> None:
    index = TrajectoryIndex(gone_kept=2)
    index.apply(told(make_summary("held", "p")))
    for number in range(5):
        left = index.apply(told(make_summary(f"gone-{number}", "p", state=TrajectoryState.TRAINED, started_at=number)))
    assert left == [("gone-2", "p")]
    assert sorted(uids(index.find(Search()))) == ["gone-3", "gone-4", "held"]
    assert index.find(Search()).total == 3


def test_a_group_is_that_of_the_name_or_the_prompts_last() -> None:
    index = TrajectoryIndex()
    index.apply(told(*(make_summary(f"t{n}", "p", group=n // 2) for n in range(4)), make_summary("x", "q", group=9)))
    assert [row.trajectory_uid for row in index.group("p", None, None)] == ["t2", "t3"]
    assert [row.trajectory_uid for row in index.group("p", 0, "pool")] == ["t0", "t1"]
    assert index.group("p", 0, "elsewhere") == []


def test_the_oldest_held_are_told_by_channel(index: TrajectoryIndex) -> None:
    assert index.oldest_held() == {"train": 1.0, "validation": 3.0}
    assert TrajectoryIndex().oldest_held() == {}


def indexed(count: int) -> TrajectoryIndex:
    index = TrajectoryIndex()
    for start in range(0, count, 1_000):
        index.apply(told(*map(summary_of, range(start, start + 1_000))))
    return index


def calls_of(index: TrajectoryIndex, search: Search) -> int:
    """Calls of functions, Python's and C's, that a search makes: they do not depend on the machine."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        index.find(search)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"channel": "train", "state": "ready", "reward_min": 0.5, "version_min": 3},
        {"mark": "odd", "sort": "-reward"},
        {"exactness": "engine", "sort": "tokens", "offset": 500},
    ],
)
def test_the_work_of_a_search_does_not_grow_with_the_index(filters: Any) -> None:
    """The rows are compared by numpy. A loop over rows in Python would make 10 times as many calls."""
    search = Search(**filters)
    small, large = indexed(1_000), indexed(10_000)
    assert large.find(search).total == 10_000
    assert calls_of(large, search) <= calls_of(small, search) + 10


def test_uids_are_compared_only_in_rows_that_pass_the_other_filters() -> None:
    index = indexed(10_000)
    candidates = index.find(Search(state="ready", reward_min=0.9)).facets["state"]
    narrow = calls_of(index, Search(state="ready", reward_min=0.9, uid="7"))
    assert narrow < calls_of(index, Search()) + 5 * sum(candidates.values())
    assert 5 * sum(candidates.values()) < 10_000
