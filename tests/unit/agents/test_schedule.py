from collections import deque
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.agents.dataset import Prompt
from stepwell.agents.rollout import RolloutStatus
from stepwell.agents.schedule import GroupEnd, GroupSizes, RolloutSchedule, RolloutStart, StartPace

COMPLETED, ABORTED, EMPTY, LATE, FAILED = RolloutStatus
FREE = StartPace(None)
"""A pool that does not know how much may start."""


def make_plan(
    *, size: int = 2, concurrency: int = 100, retries: int = 1, groups: int | None = None, known: Sequence[str] = ()
) -> RolloutSchedule:
    prompts = (Prompt(f"g{number}", {}) for number in count())
    find = {uid: Prompt(uid, {}) for uid in known}.get
    return RolloutSchedule(prompts, find, GroupSizes(size, 1), concurrency=concurrency, retries=retries, groups=groups)


def tell(plan: RolloutSchedule, pace: StartPace | None) -> None:
    plan.pacing_requested()
    plan.pacing_received(pace)


def names(starts: Sequence[RolloutStart]) -> list[str]:
    return [start.prompt.uid for start in starts]


def test_nothing_starts_before_the_pool_has_said_how_it_is_nor_while_it_does_not_answer() -> None:
    plan = make_plan(groups=1)
    assert plan.next_starts() == []
    tell(plan, None)
    assert plan.next_starts() == []
    tell(plan, FREE)
    assert names(plan.next_starts()) == ["g0", "g0"]


def test_no_more_run_than_the_bound_on_concurrency() -> None:
    plan = make_plan(size=3, concurrency=4)
    tell(plan, FREE)
    starts = plan.next_starts()
    assert names(starts) == ["g0", "g0", "g0", "g1"]
    plan.ended(starts[0], COMPLETED)
    assert names(plan.next_starts()) == ["g1"]
    assert plan.running == 4


def test_groups_are_opened_only_as_far_as_the_pool_leaves_room() -> None:
    plan = make_plan(size=4)
    tell(plan, StartPace(8))
    assert names(plan.next_starts()) == ["g0"] * 4 + ["g1"] * 4
    assert plan.next_starts() == []


def test_what_has_started_counts_until_an_answer_that_knows_of_it() -> None:
    plan = make_plan(size=1)
    tell(plan, StartPace(2))
    first = plan.next_starts()
    tell(plan, StartPace(2))  # the pool was asked before either was opened
    assert plan.next_starts() == []
    plan.opened(first[0])
    tell(plan, StartPace(1))
    assert plan.next_starts() == []
    plan.opened(first[1])
    tell(plan, StartPace(1))
    assert len(plan.next_starts()) == 1


def test_what_starts_between_question_and_answer_counts_too() -> None:
    plan = make_plan(size=1)
    tell(plan, StartPace(2))
    plan.pacing_requested()
    for start in plan.next_starts():
        plan.opened(start)
    plan.pacing_received(StartPace(2))
    assert plan.next_starts() == []


def test_a_group_is_opened_whole_even_where_the_pool_has_room_for_less() -> None:
    plan = make_plan(size=4)
    tell(plan, StartPace(1))
    assert names(plan.next_starts()) == ["g0"] * 4, "a batch smaller than a group would otherwise never be made"
    assert plan.next_starts() == []


def test_what_is_nearly_complete_comes_first() -> None:
    plan = make_plan(size=3, concurrency=6, groups=2)
    tell(plan, FREE)
    starts = plan.next_starts()
    for start in starts[3:5]:
        plan.ended(start, COMPLETED)
    plan.ended(starts[5], ABORTED)
    plan.ended(starts[0], ABORTED)
    assert [(start.prompt.uid, start.attempt) for start in plan.next_starts()] == [("g1", 1), ("g0", 1)]


@pytest.mark.parametrize("status", [ABORTED, EMPTY, FAILED])
def test_a_failed_rollout_is_tried_again_and_its_group_given_up_after_the_last_try(status: RolloutStatus) -> None:
    plan = make_plan(size=3, retries=2, groups=1)
    tell(plan, FREE)
    failing, other, done = plan.next_starts()
    assert plan.ended(done, COMPLETED) is None
    for attempt in (1, 2):
        assert plan.ended(failing, status) is None
        (failing,) = plan.next_starts()
        assert failing.attempt == attempt
    assert plan.ended(failing, status) == GroupEnd(
        failing.prompt, is_validation=False, completed=1, is_given_up=True, to_cancel=(other,)
    )
    assert not plan.is_over, "one is still running"
    assert plan.ended(other, None) is None
    assert plan.is_over


def test_a_group_ends_when_its_last_rollout_does() -> None:
    plan = make_plan(groups=1)
    tell(plan, FREE)
    first, second = plan.next_starts()
    assert plan.ended(first, COMPLETED) is None
    assert plan.ended(second, COMPLETED) == GroupEnd(second.prompt, False, completed=2, is_given_up=False)
    assert plan.ended(second, None) is None
    assert plan.is_over


def test_a_rollout_that_the_pool_let_go_is_not_tried_again_nor_is_the_rest_of_its_group() -> None:
    plan = make_plan(size=3, concurrency=2, groups=1)
    tell(plan, FREE)
    first, second = plan.next_starts()
    plan.ended(first, LATE)
    assert plan.next_starts() == []
    end = plan.ended(second, ABORTED)
    assert end is not None
    assert not end.is_given_up


def test_a_group_that_the_pool_wants_more_of_gets_as_many_as_are_missing_once() -> None:
    plan = make_plan(size=3, groups=1)
    tell(plan, FREE)
    first, *lost = plan.next_starts()
    for start in (first, *lost):
        plan.opened(start)
    plan.ended(first, COMPLETED)
    wanted = StartPace(None, [("g0", 2)])
    tell(plan, wanted)
    again = plan.next_starts()
    assert names(again) == ["g0", "g0"]
    tell(plan, wanted)  # the pool does not know of them yet
    assert plan.next_starts() == []
    for start in lost:
        plan.ended(start, LATE)
    assert plan.ended(again[0], COMPLETED) is None
    assert plan.ended(again[1], COMPLETED) is not None


def test_a_group_from_before_a_restart_is_refilled_and_a_strangers_is_not() -> None:
    plan = make_plan(groups=0, known=["before"])
    tell(plan, StartPace(0, [("before", 1), ("stranger", 3)]))
    (start,) = plan.next_starts()
    assert start.prompt.uid == "before"
    assert not plan.is_over
    plan.ended(start, COMPLETED)
    assert plan.is_over


def test_a_group_that_was_given_up_is_not_refilled() -> None:
    plan = make_plan(size=1, retries=0, groups=1, known=["g0"])
    tell(plan, FREE)
    (start,) = plan.next_starts()
    plan.ended(start, ABORTED)
    tell(plan, StartPace(None, [("g0", 1)]))
    assert plan.next_starts() == []


def test_validation_is_started_first_and_does_not_count_for_pacing() -> None:
    plan = make_plan(size=2, concurrency=5)
    plan.validate([Prompt(f"v{number}", {}) for number in range(3)])
    tell(plan, StartPace(2))
    starts = plan.next_starts()
    assert names(starts) == ["v0", "v1", "v2", "g0", "g0"]
    assert [start.is_validation for start in starts] == [True] * 3 + [False] * 2
    for start in starts[:3]:
        assert plan.is_validating
        plan.ended(start, COMPLETED)
    assert not plan.is_validating


def test_a_stopped_plan_finishes_what_is_open() -> None:
    plan = make_plan(size=2, concurrency=1)
    tell(plan, FREE)
    (first,) = plan.next_starts()
    plan.stop()
    plan.ended(first, COMPLETED)
    (second,) = plan.next_starts()
    assert second.prompt.uid == "g0"
    plan.ended(second, COMPLETED)
    assert plan.is_over
    assert plan.next_starts() == []


class ToyPool:
    """Counts rollouts as the pool does, and may answer late."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.in_flight = self.queued = 0

    def pace(self) -> StartPace:
        return StartPace(max(0, self.room - self.in_flight - self.queued))


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_the_pools_room_is_never_exceeded_whatever_the_order_of_events(
    data: st.DataObject, size: int, batches: int
) -> None:
    plan, pool = make_plan(size=size, retries=100), ToyPool(size * batches)
    running: deque[RolloutStart] = deque()
    opened: deque[RolloutStart] = deque()
    answers: deque[StartPace] = deque()
    for _ in range(60):
        event = data.draw(st.sampled_from(["ask", "count", "answer", "start", "open", "complete", "abort", "train"]))
        if event == "ask" and not answers:
            plan.pacing_requested()
            answers.append(StartPace(-1))
        elif event == "count" and answers:
            answers[0] = pool.pace()
        elif event == "answer" and answers and answers[0].may_start != -1:
            plan.pacing_received(answers.popleft())
        elif event == "start":
            running.extend(plan.next_starts())
        elif event == "open" and running:
            pool.in_flight += 1
            opened.append(running.popleft())
            plan.opened(opened[-1])
        elif event in ("complete", "abort") and opened:
            pool.in_flight -= 1
            pool.queued += event == "complete"
            plan.ended(opened.popleft(), COMPLETED if event == "complete" else ABORTED)
        elif event == "train" and pool.queued >= size:
            pool.queued -= size
        assert pool.in_flight + pool.queued + len(running) <= pool.room
