"""Another measure of staleness is a class and a row: here the seconds since a call began."""

from collections.abc import MutableMapping
from typing import cast

import pytest

from rig.builders import EasyPool
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.staleness import DISTANCES, AgedStep, Distance, Present
from stepwell.pool.api.watching import TrajectoryState, why_not_trained


class SecondsSinceSampled(Distance):
    def of_tokens(self, step: AgedStep, version: int, present: Present) -> float:
        return present.now - step.started_at

    def words(self, distance: float) -> str:
        return f"{distance:g} s old"


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    table = cast("MutableMapping[str, type[Distance]]", DISTANCES)
    monkeypatch.setitem(table, "seconds", SecondsSinceSampled)


def pool_by_seconds(**limits: str) -> EasyPool:
    """A group of a call that began at 10, one that began at 100, and the time is 120."""
    pool = EasyPool(Limits(max_staleness=60, stale_by="seconds", **limits))  # type: ignore[arg-type]
    for began_at in (10.0, 100.0):
        pool.advance(began_at + 1.0)
        pool.rollout(f"t{began_at:g}", f"p{began_at:g}", started_at=began_at, policy_version=7)
    pool.advance(120.0)
    return pool


def test_what_was_sampled_too_long_ago_is_dropped_whatever_the_version() -> None:
    pool = pool_by_seconds()
    pool.policy_version = 1_000
    (old, young) = pool.view.page(0, 10).snapshots
    told = "Its oldest token is 109 s old, and max_staleness is 60: it is dropped when its turn comes."
    assert why_not_trained(old, pool.state.limits, Present(1_000, 120.0)).endswith(told)
    assert "old" not in why_not_trained(young, pool.state.limits, Present(1_000, 120.0))
    assert "too old" in pool.preview("train").waiting[0].why
    taken = pool.take(1)
    assert [[step.trajectory_uid for step in group] for group in taken or ()] == [["t100"]]
    dropped = pool.state.last_snapshot("t10")
    assert dropped is not None
    assert (dropped.state, dropped.cause) == (TrajectoryState.DROPPED, "stale")
    assert dropped.note == "the oldest token was 110 s old"


def test_a_consequence_holds_for_every_distance() -> None:
    pool = pool_by_seconds(on_stale="keep")
    assert [group[0].trajectory_uid for group in pool.take(2) or ()] == ["t10", "t100"]
    pool = pool_by_seconds(on_stale="mask")
    assert [group[0].trajectory_uid for group in pool.take(1) or ()] == ["t100"]
    assert pool.take(1) is None, "not a token of the other one is young enough"


def test_a_distance_that_is_not_in_versions_says_nothing_of_the_batches_ahead() -> None:
    assert pool_by_seconds().pacing("train").batches_ahead is None
    assert EasyPool(Limits(max_staleness=2)).pacing("train").batches_ahead == 3
