"""A rollout that is open at its group's deadline ran too long: it counts in its group as a failure."""

from typing import Any

import pytest

from rig.builders import EasyPool, make_step
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits, OnDeadline
from stepwell.pool.api.producing import (
    ENDED_BY,
    UNFINISHED_REWARD,
    EndResult,
    Refill,
    Registration,
    RewardGiven,
    SubmitVerdict,
)
from stepwell.pool.client.batch import batch_of
from stepwell.steps.step import JsonObject

AFTER_GRACE = 50.0
"""Longer than --completion-grace after the deadline."""


def half_done(size: int = 4, metadata: JsonObject | None = None, **limits: Any) -> EasyPool:
    """A group of four with its deadline at 10: one good, one bad, two that still run."""
    p = EasyPool(Limits(group_deadline=10.0, **limits))
    for uid in ("good", "bad", "slow", "slower"):
        p.register(Registration(uid, "p", group_size=size, metadata=metadata))
        p.submit([make_step(uid, "p", uid=uid)])
    p.complete("good", "p", 1.0)
    p.complete("bad", "p", 0.0)
    return p


def returns(p: EasyPool, **how: Any) -> dict[str, float]:
    leased = p.lease(1, **how)
    assert leased is not None
    batch = batch_of(leased[1])
    whole = batch.whole_groups()
    return dict(zip(dict.fromkeys(batch.columns.trajectory_uids), whole.returns_T.tolist(), strict=True))


@pytest.mark.parametrize("action", [OnDeadline.PARTIAL, OnDeadline.REFILL])
def test_what_runs_too_long_is_in_the_baseline_of_its_group(action: OnDeadline) -> None:
    p = half_done(on_deadline=action)
    p.advance(9.9)
    assert p.lease(1) is None
    p.advance(10.0)
    assert returns(p) == {"good": 1.0, "bad": 0.0, "slow": 0.0, "slower": 0.0}
    assert p.stats().unfinished == 2
    assert not p.stats().channels["train"].dropped
    assert p.pacing("train").refills == ()


def test_the_pool_has_a_reward_for_it_and_a_rollout_may_bring_its_own() -> None:
    p = half_done(unfinished_reward=-1.0)
    p.advance(10.0)
    assert returns(p) == {"good": 1.0, "bad": 0.0, "slow": -1.0, "slower": -1.0}
    p = half_done(metadata={UNFINISHED_REWARD: -0.5})
    p.advance(10.0)
    assert returns(p) == {"good": 1.0, "bad": 0.0, "slow": -0.5, "slower": -0.5}


def test_it_can_be_dropped_instead() -> None:
    p = half_done(unfinished_reward=None)
    p.advance(10.0)
    assert returns(p) == {"good": 1.0, "bad": 0.0}
    assert p.stats().channels["train"].dropped["deadline"].steps == 2
    assert p.stats().unfinished == 0


def test_it_says_how_it_ended() -> None:
    p = half_done()
    p.advance(10.0)
    taken = p.take(1)
    assert taken is not None
    assert [step.metadata.get(ENDED_BY) for step in taken[0]] == [None, None, "deadline", "deadline"]


def test_its_later_steps_and_its_own_end_are_late() -> None:
    p = half_done()
    p.advance(10.0)
    p.advance(AFTER_GRACE)
    assert p.submit([make_step("slow", "p", uid="later", started_at=20.0)]) == [SubmitVerdict.LATE]
    assert p.stats().refused["late"] == 1
    assert p.complete("slow", "p", 1.0) is EndResult.LATE
    assert returns(p)["slow"] == 0.0
    assert p.complete("slower", "p", 1.0) is EndResult.LATE


def test_one_that_fails_by_the_infrastructure_after_the_deadline_leaves_its_group() -> None:
    p = half_done()
    p.advance(10.0)
    assert p.abort("slow", "p") is EndResult.ABORTED
    assert returns(p) == {"good": 1.0, "bad": 0.0, "slower": 0.0}, "the group waits for nobody"


def test_one_without_a_recorded_call_counts_too() -> None:
    p = EasyPool(Limits(group_deadline=10.0, group_size=2))
    p.rollout("good", "p", 1.0, size=2)
    p.register(Registration("in its first answer", "p"))
    p.advance(10.0)
    leased = p.lease(1)
    assert leased is not None
    assert sorted(batch_of(leased[1]).whole_groups().returns_T.tolist()) == [0.0, 1.0]


def test_a_reward_that_it_has_already_stays() -> None:
    p = half_done(require_reward=True)
    p.ingest.reward(RewardGiven(trajectory_uid="slow", prompt_uid="p", value=0.7, source="a judge"))
    p.advance(10.0)
    assert returns(p) == {"good": 1.0, "bad": 0.0, "slow": 0.7, "slower": 0.0}


def test_a_refill_asks_only_for_places_that_nobody_took() -> None:
    p = half_done(size=6, on_deadline=OnDeadline.REFILL)
    p.advance(10.0)
    assert p.pacing("train").refills == (Refill("p", 2),)
    for uid in ("new", "newer"):
        p.rollout(uid, "p", 1.0, size=6)
    assert sorted(returns(p).values()) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("unit", [Unit.TRAJECTORIES, Unit.STEPS])
def test_single_trajectories_and_steps_are_handed_out_too(unit: Unit) -> None:
    p = half_done()
    p.advance(10.0)
    leased = p.lease(4, unit=unit)
    assert leased is not None
    assert sorted(leased[1].columns.trajectory_uids) == ["bad", "good", "slow", "slower"]
