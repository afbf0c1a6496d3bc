"""Leases, units, order and history: what a consumer gets, and what comes back."""

import pytest

from rig.builders import EasyPool, in_groups, make_step
from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.leasing import Order, Settlement, Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.steps.step import Step


def prompts(groups: list[list[Step]] | None) -> list[str]:
    assert groups is not None
    return [group[0].prompt_uid for group in groups]


def filled(count: int = 3, **limits: int) -> EasyPool:
    pool = EasyPool(Limits(**limits))  # type: ignore[arg-type]
    for n in range(count):
        pool.rollout(f"t{n}", f"p{n}")
    return pool


def leased(pool: EasyPool, count: int = 1, seconds: float = 60.0) -> tuple[str, list[list[Step]]]:
    found = pool.lease(count, seconds=seconds)
    assert found is not None
    return found[0], in_groups(found[1])


def test_what_is_under_lease_is_handed_out_to_no_one_else() -> None:
    pool = filled(2)
    assert prompts(leased(pool)[1]) == ["p0"]
    assert prompts(leased(pool)[1]) == ["p1"]
    assert pool.lease(1) is None


def test_an_acknowledged_batch_never_comes_back() -> None:
    pool = filled(1)
    uid, _ = leased(pool)
    assert pool.leasing.ack(uid) is Settlement.DONE
    pool.advance(1e9)
    assert pool.lease(1) is None
    assert pool.stats().channels["train"].shipped.steps == 1


def test_a_batch_given_back_goes_to_the_head_in_order_and_remembers_it() -> None:
    pool = filled(4)
    uid, _ = leased(pool, 2)
    assert pool.leasing.nack(uid) is Settlement.DONE
    found = pool.lease(3)
    assert found is not None
    assert prompts(in_groups(found[1])) == ["p0", "p1", "p2"]
    assert found[1].attempts == [1, 1, 0]


def test_a_lease_that_expires_gives_its_groups_back_once() -> None:
    pool = filled(2)
    uid, _ = leased(pool, 1, seconds=10)
    pool.advance(9.9)
    assert prompts(leased(pool)[1]) == ["p1"]
    pool.advance(10)
    assert prompts(leased(pool)[1]) == ["p0"]
    assert pool.leasing.ack(uid) is Settlement.EXPIRED
    assert pool.lease(1) is None


def test_asking_again_under_the_same_name_gives_the_same_again() -> None:
    pool = filled(2)
    uid, first = leased(pool)
    pool.leases -= 1
    again, second = leased(pool)
    assert (uid, prompts(first)) == (again, prompts(second))


def test_ending_a_lease_twice_is_harmless_and_an_unknown_one_is_called_so() -> None:
    pool = filled(1)
    uid, _ = leased(pool)
    assert [pool.leasing.ack(uid), pool.leasing.ack(uid)] == [Settlement.DONE, Settlement.DONE]
    assert pool.leasing.ack("never heard of") is Settlement.UNKNOWN


def test_a_step_or_reward_that_comes_while_its_group_is_under_lease_is_late() -> None:
    pool = filled(1)
    leased(pool)
    assert pool.submit([make_step("t0", "p0", uid="late")]) == [SubmitVerdict.LATE]
    assert pool.submit([make_step("t0", "p0", uid="t0-0")]) == [SubmitVerdict.DUPLICATE]
    assert pool.complete("t0", "p0", 5.0) == "late"


def test_in_strict_order_nothing_overtakes_the_oldest() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("slow", "old"))
    pool.rollout("quick", "young")
    assert pool.lease(1, order=Order.STRICT) is None
    pool.submit([make_step("slow", "old")])
    pool.complete("slow", "old")
    assert prompts(pool.take(2, order=Order.STRICT)) == ["old", "young"]


def test_complete_trajectories_can_be_taken_before_their_group_is() -> None:
    pool = EasyPool(Limits())
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=3)
    taken = pool.take(2, unit=Unit.TRAJECTORIES)
    assert taken is not None
    assert [[step.trajectory_uid for step in group] for group in taken] == [["a"], ["b"]]
    pool.rollout("c", "p", size=3)
    assert pool.take(1, unit=Unit.TRAJECTORIES) is not None
    assert pool.stats().channels["train"].held.steps == 0


def test_single_steps_can_be_taken_as_they_arrive_before_the_episode_ends() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="a", started_at=1), make_step(uid="b", started_at=2)])
    taken = pool.take(2, unit=Unit.STEPS)
    assert taken is not None
    assert [(group[0].uid, group[0].step_index, group[0].is_last) for group in taken] == [
        ("a", 0, False),
        ("b", 1, False),
    ]
    assert pool.submit([make_step(uid="a")]) == [SubmitVerdict.DUPLICATE]
    pool.submit([make_step(uid="c", started_at=3)])
    pool.complete("t", "p", 1.0)
    assert [[(s.step_index, s.is_last, s.reward) for s in group] for group in pool.take(1, unit=Unit.STEPS) or []] == [
        [(2, True, 1.0)]
    ]
    assert pool.stats().channels["train"].groups == 0


@pytest.mark.parametrize("end", ["ack", "nack"])
def test_a_step_whose_rollout_is_dropped_while_it_is_under_lease_does_not_come_back(end: str) -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p", group_size=2))
    pool.register(Registration("other", "p", group_size=2))
    pool.submit([make_step(uid="a")])
    found = pool.lease(1, unit=Unit.STEPS)
    assert found is not None
    pool.abort("t", "p")
    assert getattr(pool.leasing, end)(found[0]) is Settlement.DONE
    assert pool.lease(1, unit=Unit.STEPS) is None
    stats = pool.stats().channels["train"]
    assert (stats.dropped["aborted"].steps, stats.shipped.steps, stats.held.steps) == (1, 0, 0)


def test_a_channel_is_consumed_by_one_unit() -> None:
    pool = filled(2)
    pool.take(1)
    with pytest.raises(Conflict, match="consumed by groups, not by steps"):
        pool.take(1, unit=Unit.STEPS)


def test_a_share_of_the_batch_can_come_from_what_was_trained_before() -> None:
    pool = filled(8, history_size=4)
    pool.take(4)
    found = pool.lease(4, history=0.5)
    assert found is not None
    assert found[1].from_history == [False, False, True, True]
    fresh, old = prompts(in_groups(found[1]))[:2], prompts(in_groups(found[1]))[2:]
    assert fresh == ["p4", "p5"]
    assert set(old) <= {"p0", "p1", "p2", "p3"}
    pool.leasing.ack(found[0])
    assert pool.stats().channels["train"].shipped.steps == 6, "history was counted as shipped again"


def test_history_is_bounded_and_fresh_data_fills_its_place_while_there_is_none() -> None:
    pool = filled(6, history_size=2)
    assert prompts(pool.take(2, history=1.0)) == ["p0", "p1"]
    pool.take(2)
    assert pool.stats().channels["train"].history_groups == 2
    assert set(prompts(pool.take(2, history=1.0))) == {"p2", "p3"}


def test_history_is_mixed_into_groups_only() -> None:
    pool = filled(1)
    with pytest.raises(BadRequest, match="history is kept by groups"):
        pool.take(1, unit=Unit.STEPS, history=0.5)
