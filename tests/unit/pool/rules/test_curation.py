"""Curation: what people decide holds for every later batch, once, and is on the audit trail."""

from typing import Any

import pytest

from rig.builders import EasyPool, make_step
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.slices.curation import Curation, CurationAction, CurationOutcome


def curate(
    pool: EasyPool, action: CurationAction, uid: str, prompt: str = "p", by: str = "ana", **fields: Any
) -> CurationOutcome:
    curation = Curation(action=action, trajectory_uid=uid, prompt_uid=prompt, by=by, **fields)
    return pool.curator.curate(curation)


def reject(pool: EasyPool, uid: str, prompt: str = "p", **fields: Any) -> CurationOutcome:
    return curate(pool, CurationAction.REJECT, uid, prompt, **fields)


def relabel(pool: EasyPool, uid: str, reward: float, prompt: str = "p", **fields: Any) -> CurationOutcome:
    return curate(pool, CurationAction.RELABEL, uid, prompt, reward=reward, **fields)


def taken_uids(pool: EasyPool, count: int = 1, **how: Any) -> list[list[str]] | None:
    groups = pool.take(count, **how)
    return None if groups is None else [[step.trajectory_uid for step in group] for group in groups]


def dropped(pool: EasyPool) -> dict[str, int]:
    return {cause: tally.steps for cause, tally in pool.stats().channels["train"].dropped.items()}


# -- reject ------------------------------------------------------------------------------------------------------------


def test_a_rejected_trajectory_leaves_its_group_which_goes_on_with_one_place_less() -> None:
    pool = EasyPool(Limits(group_size=3))
    for uid in ("a", "b", "c"):
        pool.rollout(uid, "p", size=3)
    assert reject(pool, "b", why="wrong tool") is CurationOutcome.DONE
    assert taken_uids(pool) == [["a", "c"]]
    assert dropped(pool) == {"rejected": 1}
    assert pool.submit([make_step("b", uid="late")]) == [SubmitVerdict.LATE]


def test_the_others_do_not_wait_for_a_replacement_and_may_still_join_by_the_size_they_know() -> None:
    pool = EasyPool(Limits())
    pool.rollout("a", "p", size=3)
    pool.register(Registration("open", "p", group_size=3))
    assert reject(pool, "open") is CurationOutcome.DONE
    pool.register(Registration("a", "p", group_size=3))
    pool.rollout("c", "p", size=3)
    assert taken_uids(pool) == [["a", "c"]]


def test_a_group_becomes_ready_when_the_one_it_waited_for_is_rejected() -> None:
    pool = EasyPool(Limits(group_size=2))
    pool.rollout("done", "p", size=2)
    pool.register(Registration("slow", "p"))
    assert pool.take(1) is None
    reject(pool, "slow")
    assert taken_uids(pool) == [["done"]]


def test_a_group_left_without_any_is_gone() -> None:
    pool = EasyPool(Limits(group_size=2))
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=2)
    reject(pool, "a")
    reject(pool, "b")
    assert pool.stats().channels["train"].groups == 0
    assert dropped(pool) == {"rejected": 2}


def test_one_under_lease_is_not_handed_out_again() -> None:
    pool = EasyPool(Limits(group_size=2))
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=2)
    leased = pool.lease(1)
    assert leased is not None
    assert reject(pool, "a") is CurationOutcome.DONE
    assert reject(pool, "a") is CurationOutcome.UNCHANGED
    assert dropped(pool) == {}, "the trainer may still train it"
    pool.leasing.nack(leased[0])
    assert dropped(pool) == {"rejected": 1}
    assert taken_uids(pool) == [["b"]]
    assert pool.curator.audit(9)[-1].before == "under lease"


def test_one_under_lease_that_is_acknowledged_was_trained_and_does_not_come_back_from_history() -> None:
    pool = EasyPool(Limits(group_size=2, history_size=4))
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=2)
    leased = pool.lease(1)
    assert leased is not None
    reject(pool, "a")
    pool.leasing.ack(leased[0])
    assert dropped(pool) == {}
    assert pool.stats().channels["train"].shipped.steps == 2
    assert taken_uids(pool, history=1.0) == [["b"]]
    assert reject(pool, "a") is CurationOutcome.UNCHANGED


def test_one_in_the_history_is_drawn_no_more() -> None:
    pool = EasyPool(Limits(group_size=2, history_size=4))
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=2)
    pool.take(1)
    assert taken_uids(pool, history=1.0) == [["a", "b"]]
    assert reject(pool, "a") is CurationOutcome.DONE
    assert taken_uids(pool, history=1.0) == [["b"]]
    reject(pool, "b")
    assert pool.stats().channels["train"].history_groups == 0


@pytest.mark.parametrize("unit", [Unit.TRAJECTORIES, Unit.STEPS])
def test_it_holds_for_consumers_of_trajectories_and_of_steps(unit: Unit) -> None:
    pool = EasyPool(Limits(group_size=2))
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=2)
    leased = pool.lease(1, unit=unit)
    assert leased is not None
    assert leased[1].columns.trajectory_uids == ["a"]
    reject(pool, "a")
    pool.leasing.nack(leased[0])
    assert taken_uids(pool, unit=unit) == [["b"]]
    assert pool.take(1, unit=unit) is None
    assert dropped(pool) == {"rejected": 1}
    assert pool.stats().channels["train"].held.steps == 0


def test_a_spent_group_goes_when_the_last_that_was_open_is_rejected() -> None:
    pool = EasyPool(Limits(group_size=2))
    pool.rollout("a", "p", size=2)
    pool.register(Registration("b", "p"))
    pool.take(1, unit=Unit.STEPS)
    reject(pool, "b")
    assert pool.stats().channels["train"].groups == 0


def test_what_was_trained_cannot_be_taken_back() -> None:
    pool = EasyPool(Limits())
    pool.rollout("t", "p")
    pool.take(1)
    assert reject(pool, "t") is CurationOutcome.LATE
    assert pool.curator.audit(1)[0].before == "trained"


def test_a_rejection_sent_again_changes_nothing() -> None:
    pool = EasyPool(Limits(group_size=3))
    for uid in ("a", "b", "c"):
        pool.rollout(uid, "p", size=3)
    assert [reject(pool, "a") for _ in range(3)] == [
        CurationOutcome.DONE,
        CurationOutcome.UNCHANGED,
        CurationOutcome.UNCHANGED,
    ]
    assert taken_uids(pool) == [["b", "c"]]


# -- relabel -----------------------------------------------------------------------------------------------------------


def test_the_new_reward_is_the_one_that_is_trained() -> None:
    pool = EasyPool(Limits())
    pool.rollout("t", "p", 1.0)
    assert relabel(pool, "t", -1.0, why="it cheated") is CurationOutcome.DONE
    assert relabel(pool, "t", -1.0, why="it cheated") is CurationOutcome.UNCHANGED
    ((step,),) = pool.take(1) or [[]]
    assert (step.reward, step.reward_source, step.reward_revision) == (-1.0, "curation:ana", 2)
    assert step.metadata["reward"] == {"notes": "it cheated"}


def test_it_takes_the_place_of_rewards_that_steps_have_of_their_own() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=str(n), started_at=n, reward=0.5, reward_revision=4) for n in range(2)])
    pool.complete("t", "p")
    relabel(pool, "t", 2.0)
    (steps,) = pool.take(1) or [[]]
    assert [step.reward for step in steps] == [None, 2.0]
    assert steps[1].reward_revision == 5
    assert pool.curator.audit(1)[0].before == "1.0"


def test_it_counts_for_what_comes_back_from_a_lease_and_for_the_history() -> None:
    pool = EasyPool(Limits(history_size=2))
    pool.rollout("t", "p", 1.0)
    leased = pool.lease(1)
    assert leased is not None
    assert relabel(pool, "t", 0.25) is CurationOutcome.DONE
    pool.leasing.nack(leased[0])
    assert [group[0].reward for group in pool.take(1) or []] == [0.25]
    assert relabel(pool, "t", 0.75, by="bo") is CurationOutcome.DONE
    ((step,),) = pool.take(1, history=1.0) or [[]]
    assert (step.reward, step.reward_source) == (0.75, "curation:bo")


def test_a_persons_reward_stands_whatever_comes_later() -> None:
    pool = EasyPool(Limits(require_reward=True))
    pool.register(Registration("t", "p"))
    relabel(pool, "t", 0.25)
    pool.submit([make_step(uid="1", reward=9.0)])
    assert pool.complete("t", "p", 1.0) is EndResult.COMPLETED
    assert not pool.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=3.0))
    assert not pool.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=3.0, step_index=0))
    assert pool.state.trajectories["t"].is_relabelled
    assert [group[0].reward for group in pool.take(1) or []] == [0.25]


def test_it_makes_a_group_ready_that_waited_for_a_reward_and_a_worker_comes_too_late() -> None:
    pool = EasyPool(Limits(require_reward=True))
    pool.rollout("t", "p", None)
    assert pool.take_unscored()
    relabel(pool, "t", 0.5)
    assert not pool.judge("t", "p", 1.0)
    assert [group[0].reward for group in pool.take(1) or []] == [0.5]


def test_one_that_is_gone_is_late() -> None:
    pool = EasyPool(Limits())
    pool.rollout("t", "p", 1.0)
    pool.take(1)
    first = Curation(action=CurationAction.RELABEL, trajectory_uid="t", prompt_uid="p", by="ana", reward=0.5)
    assert not pool.curator.repeats(first)
    assert pool.curator.curate(first) is CurationOutcome.LATE
    assert pool.curator.repeats(first)


# -- marks, and the trail ----------------------------------------------------------------------------------------------


def test_marks_travel_with_the_trajectory() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p", metadata={"task": 7}))
    pool.submit([make_step(uid="1")])
    pool.complete("t", "p", 1.0)
    for mark in ("good", "odd", "good"):
        curate(pool, CurationAction.MARK, "t", mark=mark)
    assert curate(pool, CurationAction.UNMARK, "t", mark="odd") is CurationOutcome.DONE
    assert curate(pool, CurationAction.UNMARK, "t", mark="odd") is CurationOutcome.UNCHANGED
    ((step,),) = pool.take(1) or [[]]
    assert step.metadata == {"task": 7, "marks": ["good"]}


def test_there_are_at_most_so_many_marks() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    for n in range(20):
        assert curate(pool, CurationAction.MARK, "t", mark=f"m{n}") is CurationOutcome.DONE
    with pytest.raises(BadRequest, match="has 20 marks already"):
        curate(pool, CurationAction.MARK, "t", mark="one more")


def test_every_attempt_is_on_the_trail_with_who_when_and_what_was_before() -> None:
    pool = EasyPool(Limits())
    pool.advance(50)
    pool.rollout("t", "p", 1.0)
    relabel(pool, "t", 0.5, why="half right")
    pool.advance(60)
    reject(pool, "t", by="bo")
    reject(pool, "nobody", by="bo")
    told = [(e.at, e.by, e.action.value, e.outcome.value, e.before, e.after) for e in pool.curator.audit(10)]
    assert told == [
        (60, "bo", "reject", "unknown", "", ""),
        (60, "bo", "reject", "done", "complete", "dropped: rejected"),
        (50, "ana", "relabel", "done", "1.0 by completion", "0.5"),
    ]
    assert [entry.why for entry in pool.curator.audit(10, "t")] == ["", "half right"]
    assert len(pool.curator.audit(1)) == 1


def test_a_trajectory_of_another_prompt_is_unknown() -> None:
    pool = EasyPool(Limits())
    pool.rollout("t", "p")
    assert reject(pool, "t", "q") is CurationOutcome.UNKNOWN
    assert pool.take(1) is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"by": ""}, "names its author"),
        ({"by": "x" * 81}, "names its author"),
        ({"why": "x" * 501}, "500 is the most"),
        ({"action": CurationAction.MARK}, "1 to 40 characters"),
        ({"action": CurationAction.MARK, "mark": "x" * 41}, "1 to 40 characters"),
        ({"action": CurationAction.RELABEL}, "a finite number, not None"),
        ({"action": CurationAction.RELABEL, "reward": float("nan")}, "a finite number, not nan"),
    ],
)
def test_a_decision_that_makes_no_sense_is_refused_and_leaves_no_trace(fields: dict[str, Any], said: str) -> None:
    pool = EasyPool(Limits())
    pool.rollout("t", "p")
    whole: dict[str, Any] = {
        "action": CurationAction.REJECT,
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "by": "ana",
        **fields,
    }
    with pytest.raises(BadRequest, match=said):
        pool.curator.curate(Curation(**whole))
    assert not pool.curator.audit(1)
