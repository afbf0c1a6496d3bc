"""The filter: what a consumer does not train on, where the reward goes then, and what becomes of the rest."""

from typing import Any

import pytest

from rig.builders import EasyPool, in_groups, make_step
from stepwell.pool.api.leasing import BatchRequest, Order, Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, RewardGiven, SubmitVerdict
from stepwell.steps.step import Exactness, Step

SIDE_CALL = "side_call: a title was asked for"
GREEDY = "greedy: temperature is 0"


def turns(pool: EasyPool, *marks: str | None, uid: str = "t", prompt: str = "p", size: int = 1, **fields: Any) -> None:
    """A trajectory with one step a mark, complete, with a reward of 1."""
    pool.register(Registration(uid, prompt, group_size=size))
    for n, mark in enumerate(marks):
        step = make_step(uid, prompt, uid=f"{uid}-{n}", started_at=n, untrainable=mark, **fields)
        assert pool.submit([step]) == [SubmitVerdict.ACCEPTED]
    pool.complete(uid, prompt, 1.0)


def taken(pool: EasyPool, count: int = 1, **how: Any) -> list[list[Step]]:
    groups = pool.take(count, **how)
    assert groups is not None
    return groups


def shown(steps: list[Step]) -> list[tuple[int, bool, float | None]]:
    return [(step.step_index, step.is_last, step.reward) for step in steps]


def left_out(pool: EasyPool) -> dict[str, int]:
    return {kind: tally.steps for kind, tally in pool.stats().channels["train"].left_out.items()}


@pytest.mark.parametrize("grade", Exactness)
def test_grades_are_ordered_from_the_engines_own_ids_to_text_encoded_again(grade: Exactness) -> None:
    best_first = [Exactness.ENGINE, Exactness.SUBMITTED, Exactness.RETOKENIZED]
    assert [grade.at_least(other) for other in best_first] == [
        best_first.index(grade) <= place for place in range(len(best_first))
    ]


def test_a_marked_step_is_not_shipped_and_the_reward_is_on_the_last_that_is() -> None:
    pool = EasyPool(Limits())
    turns(pool, SIDE_CALL, None, None, SIDE_CALL)
    assert shown(taken(pool)[0]) == [(1, False, None), (2, True, 1.0)]
    assert left_out(pool) == {"side_call": 2}
    assert pool.stats().channels["train"].shipped.steps == 2
    assert pool.stats().channels["train"].held.steps == 0


def test_a_consumer_that_asks_gets_marked_steps_too_but_a_side_call_does_not_earn_the_tasks_reward() -> None:
    pool = EasyPool(Limits())
    turns(pool, None, SIDE_CALL)
    (steps,) = taken(pool, untrainable=True)
    assert shown(steps) == [(0, False, 1.0), (1, True, None)]
    assert [step.untrainable for step in steps] == [None, SIDE_CALL]
    assert left_out(pool) == {}


def test_where_every_step_is_marked_and_asked_for_the_last_carries_the_reward() -> None:
    pool = EasyPool(Limits())
    turns(pool, GREEDY, GREEDY)
    assert shown(taken(pool, untrainable=True)[0]) == [(0, False, None), (1, True, 1.0)]


@pytest.mark.parametrize(
    ("wanted", "shipped"),
    [
        (Exactness.ENGINE, ["engine"]),
        (Exactness.SUBMITTED, ["engine", "submitted"]),
        (Exactness.RETOKENIZED, ["engine", "submitted", "retokenized"]),
    ],
)
def test_steps_below_the_wanted_grade_are_left_out(wanted: Exactness, shipped: list[str]) -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=grade, started_at=n, exactness=grade) for n, grade in enumerate(Exactness)])
    pool.complete("t", "p", 1.0)
    (steps,) = taken(pool, min_exactness=wanted)
    assert [step.exactness.value for step in steps] == shipped
    assert steps[-1].reward == 1.0
    assert left_out(pool) == ({"exactness": 3 - len(shipped)} if len(shipped) < 3 else {})


def test_unless_told_otherwise_retokenized_steps_are_left_out() -> None:
    pool = EasyPool(Limits())
    pool.rollout("again", "p0", exactness=Exactness.RETOKENIZED)
    pool.rollout("exact", "p1", exactness=Exactness.ENGINE)
    assert [step.trajectory_uid for step in taken(pool)[0]] == ["exact"]


@pytest.mark.parametrize("order", Order)
def test_a_group_of_which_nothing_is_wanted_holds_no_one_up_and_is_not_shipped_empty(order: Order) -> None:
    pool = EasyPool(Limits())
    turns(pool, GREEDY, SIDE_CALL, uid="a", prompt="p0")
    turns(pool, None, uid="b", prompt="p1")
    assert [[step.trajectory_uid for step in group] for group in taken(pool, order=order)] == [["b"]]
    assert left_out(pool) == {"greedy": 1, "side_call": 1}
    stats = pool.stats().channels["train"]
    assert (stats.groups, stats.held.steps, stats.nbytes, stats.trajectories) == (0, 0, 0, 0)
    assert pool.submit([make_step("a", "p0", uid="late")]) == [SubmitVerdict.LATE]


def test_in_strict_order_a_group_that_is_not_complete_is_waited_for_though_its_steps_so_far_are_marked() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("slow", "p0"))
    pool.submit([make_step("slow", "p0", uid="title", untrainable=SIDE_CALL)])
    turns(pool, None, uid="b", prompt="p1")
    assert pool.take(1, order=Order.STRICT) is None
    pool.submit([make_step("slow", "p0", uid="task", started_at=1)])
    pool.complete("slow", "p0", 1.0)
    assert [[step.uid for step in group] for group in taken(pool, 2, order=Order.STRICT)] == [["task"], ["b-0"]]


def test_a_rollout_of_which_nothing_is_wanted_is_missing_from_its_group() -> None:
    pool = EasyPool(Limits())
    turns(pool, None, uid="a", size=2)
    turns(pool, GREEDY, uid="b", size=2)
    assert [step.trajectory_uid for step in taken(pool)[0]] == ["a"]
    assert left_out(pool) == {"greedy": 1}


def test_a_trajectory_of_which_nothing_is_wanted_goes_while_the_others_of_its_group_are_taken() -> None:
    pool = EasyPool(Limits())
    turns(pool, GREEDY, uid="a", size=3)
    turns(pool, None, SIDE_CALL, uid="b", size=3)
    assert [shown(group) for group in taken(pool, unit=Unit.TRAJECTORIES)] == [[(0, True, 1.0)]]
    assert left_out(pool) == {"greedy": 1, "side_call": 1}
    turns(pool, None, uid="c", size=3)
    assert [group[0].trajectory_uid for group in taken(pool, unit=Unit.TRAJECTORIES)] == ["c"]
    assert pool.stats().channels["train"].groups == 0


def test_of_single_steps_the_last_that_is_wanted_carries_the_reward() -> None:
    pool = EasyPool(Limits())
    turns(pool, None, SIDE_CALL, None, SIDE_CALL)
    groups = taken(pool, 2, unit=Unit.STEPS)
    assert [shown(group) for group in groups] == [[(0, False, None)], [(2, True, 1.0)]]
    assert pool.take(1, unit=Unit.STEPS) is None
    assert left_out(pool) == {"side_call": 2}
    assert pool.stats().channels["train"].groups == 0


def test_what_is_left_out_comes_back_with_its_group_and_can_be_asked_for_then() -> None:
    pool = EasyPool(Limits())
    turns(pool, None, GREEDY)
    leased = pool.lease(1)
    assert leased is not None
    assert pool.stats().channels["train"].held.steps == 2
    pool.leasing.nack(leased[0])
    assert left_out(pool) == {}
    assert [step.uid for step in taken(pool, untrainable=True)[0]] == ["t-0", "t-1"]


def test_asking_again_under_the_same_name_lets_the_same_through() -> None:
    pool = EasyPool(Limits())
    turns(pool, None, GREEDY)
    pool.lease(1, untrainable=True)
    pool.leases -= 1
    again = pool.lease(1)
    assert again is not None
    assert [step.uid for step in in_groups(again[1])[0]] == ["t-0", "t-1"]


def test_a_left_out_step_that_is_stale_does_not_cost_its_group() -> None:
    pool = EasyPool(Limits(max_staleness=1))
    pool.policy_version = 5
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="title", policy_version=0, untrainable=SIDE_CALL)])
    pool.submit([make_step(uid="task", policy_version=5, started_at=1)])
    pool.complete("t", "p", 1.0)
    assert [step.uid for step in taken(pool)[0]] == ["task"]


def test_a_fresh_step_that_is_left_out_does_not_save_a_group_that_is_masked_throughout() -> None:
    pool = EasyPool(Limits(max_staleness=1, on_stale="mask"))
    pool.policy_version = 5
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="task", policy_version=0)])
    pool.submit([make_step(uid="title", policy_version=5, started_at=1, untrainable=SIDE_CALL)])
    pool.complete("t", "p", 1.0)
    assert pool.take(1) is None
    assert pool.stats().channels["train"].dropped["stale"].steps == 2


def test_history_keeps_what_was_left_out_and_gives_no_one_an_empty_group() -> None:
    pool = EasyPool(Limits(history_size=4))
    turns(pool, None, GREEDY, uid="mixed", prompt="p0")
    turns(pool, GREEDY, uid="greedy", prompt="p1")
    assert pool.take(2) is None
    taken(pool)
    assert pool.stats().channels["train"].history_groups == 2
    turns(pool, None, uid="fresh", prompt="p2")
    assert [[step.uid for step in group] for group in taken(pool, 2, history=1.0)] == [["fresh-0"], ["mixed-0"]]
    drawn = taken(pool, 3, history=1.0, untrainable=True)
    assert sorted(step.uid for group in drawn for step in group) == ["fresh-0", "greedy-0", "mixed-0", "mixed-1"]


def test_a_reward_given_to_a_step_that_is_left_out_is_not_part_of_what_is_shipped() -> None:
    pool = EasyPool(Limits())
    turns(pool, SIDE_CALL, None)
    pool.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=9.0, step_index=0))
    assert shown(taken(pool)[0]) == [(1, True, 1.0)]


def test_a_consumer_that_waits_is_told_what_was_left_out() -> None:
    pool = EasyPool(Limits())
    turns(pool, GREEDY, SIDE_CALL, SIDE_CALL)
    assert pool.take(1) is None
    assert pool.waiting_for(BatchRequest(count=1, channel="train")) == (
        "1 ready groups in channel 'train'; 0 ready of 0 groups held; steps left out so far: 1 greedy, 2 side_call"
    )
