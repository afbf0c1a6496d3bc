"""What a version said that was rolled back is dropped, and counted under that cause. What a canary said is not old."""

import pytest

from rig.builders import EasyPool, make_step
from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.policy import Canary, PolicyAction, PolicyDecision
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.stats import StepCount
from stepwell.steps.step import Step, VersionSpan

CANARY = Canary(4, ("http://b",), 0.1, began_at=1.0)


def decide(pool: EasyPool, action: PolicyAction, version: int = 4, at: float = 1.0) -> None:
    canary = CANARY if action == "canary" else None
    pool.decide(PolicyDecision(version, action, "guard", "why", at), canary, None)


def uids(groups: list[list[Step]] | None) -> list[str]:
    assert groups is not None
    return [step.trajectory_uid for group in groups for step in group]


def dropped(pool: EasyPool) -> dict[str, StepCount]:
    return dict(pool.stats().channels["train"].dropped)


@pytest.fixture
def pool() -> EasyPool:
    pool = EasyPool(Limits(max_staleness=0, history_size=10))
    pool.policy_version = 3
    return pool


def test_what_a_canary_said_is_not_old(pool: EasyPool) -> None:
    decide(pool, "canary")
    pool.rollout("t", "p", policy_version=4)
    assert uids(pool.take(1)) == ["t"]
    chunk = pool.state.series.trained("train")
    assert chunk.staleness == {0: 1}


def test_of_a_group_the_rollouts_of_the_bad_version_are_dropped(pool: EasyPool) -> None:
    for n, version in enumerate((3, 4, 3)):
        pool.rollout(f"t{n}", "p", size=3, policy_version=version)
    pool.rollout("only", "q", policy_version=4)
    pool.rollout("good", "r", policy_version=3)
    decide(pool, "rollback")
    assert uids(pool.take(2)) == ["t0", "t2", "good"]
    assert dropped(pool) == {"rolled_back": StepCount(2, 8)}


def test_a_group_whose_rollouts_still_run_waits_for_them(pool: EasyPool) -> None:
    pool.rollout("t0", "p", size=2, policy_version=4)
    decide(pool, "rollback")
    assert pool.take(1) is None
    pool.rollout("t1", "p", size=2, policy_version=3)
    assert uids(pool.take(1)) == ["t1"]


@pytest.mark.parametrize(("unit", "kept"), [(Unit.TRAJECTORIES, ["good"]), (Unit.STEPS, ["mixed", "good"])])
def test_trajectories_and_single_steps_are_dropped_too(pool: EasyPool, unit: Unit, kept: list[str]) -> None:
    spans = (VersionSpan(start=0, end=1, version=3), VersionSpan(start=1, end=2, version=4))
    pool.register(Registration("mixed", "p"))
    pool.submit(
        [
            make_step("mixed", "p", uid="a", policy_version=3),
            make_step("mixed", "p", uid="b", policy_version=3, version_spans=spans, started_at=1.0),
        ]
    )
    pool.complete("mixed", "p", 1.0)
    pool.rollout("good", "q", policy_version=3)
    decide(pool, "rollback")
    assert uids(pool.take(len(kept), unit=unit)) == kept
    assert dropped(pool)["rolled_back"].steps == 3 - len(kept)


def test_trained_data_of_the_bad_version_is_not_mixed_in_again(pool: EasyPool) -> None:
    pool.rollout("old", "p", policy_version=4)
    assert uids(pool.take(1)) == ["old"]
    pool.rollout("new", "q", policy_version=3)
    decide(pool, "rollback")
    assert uids(pool.take(1, history=1.0)) == ["new"]


def test_a_version_that_was_rolled_back_is_not_promoted_and_one_that_is_tried_again_counts_again(
    pool: EasyPool,
) -> None:
    decide(pool, "rollback")
    with pytest.raises(Conflict, match="version 4 was refused or rolled back"):
        decide(pool, "promote", at=2.0)
    decide(pool, "canary", at=3.0)
    assert pool.state.serving.withdrawn == ()
    assert pool.state.serving.canary == CANARY


def test_a_decision_that_is_repeated_changes_nothing(pool: EasyPool) -> None:
    decide(pool, "canary", at=1.0)
    decide(pool, "rollback", at=2.0)
    revision = pool.state.serving.revision
    decide(pool, "canary", at=1.0)
    assert (pool.state.serving.canary, pool.state.serving.revision) == (None, revision)
    assert [decision.action for decision in pool.state.decisions] == ["canary", "rollback"]


def test_a_share_is_a_share(pool: EasyPool) -> None:
    with pytest.raises(BadRequest, match="between 0 and 1"):
        pool.decide(PolicyDecision(4, "canary", "guard", "", 1.0), Canary(4, (), 1.5, 1.0), None)


@pytest.mark.parametrize("action", ["refuse", "overdue"])
def test_what_is_said_of_a_version_leaves_the_canary_that_there_is_now(pool: EasyPool, action: PolicyAction) -> None:
    decide(pool, "canary")
    pool.decide(PolicyDecision(4 if action == "overdue" else 5, action, "guard", "why", 2.0), None, None)
    assert pool.state.serving.canary == CANARY
    decide(pool, "rollback", at=3.0)
    pool.decide(PolicyDecision(6, "refuse", "guard", "why", 4.0), CANARY, None)
    assert pool.state.serving.canary is None


def test_an_alarm_about_a_canary_that_has_ended_is_not_kept(pool: EasyPool) -> None:
    decide(pool, "canary")
    decide(pool, "rollback", at=2.0)
    decide(pool, "overdue", at=3.0)
    assert [decision.action for decision in pool.state.decisions] == ["canary", "rollback"]
    assert pool.state.serving.withdrawn == (4,)
