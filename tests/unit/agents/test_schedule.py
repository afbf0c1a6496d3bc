from collections import deque
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.agents.dataset import Prompt
from stepwell.agents.rollout import RolloutStatus
from stepwell.agents.schedule import RolloutSchedule, RolloutStart
from stepwell.wire.gateway_api import PacingNow, RefillWanted

COMPLETED, ABORTED, EMPTY, LATE, FAILED = RolloutStatus


def pacing(may_start: int | None, refills: Sequence[tuple[str, int]] = ()) -> PacingNow:
    wanted = [RefillWanted(prompt_uid=uid, missing=missing) for uid, missing in refills]
    return PacingNow(may_start=may_start, in_flight=0, queued=0, refills=wanted)


FREE = pacing(None)
"""A pool that does not know how much may start."""


def make_schedule(
    *, size: int = 2, concurrency: int = 100, retries: int = 1, groups: int | None = None, known: Sequence[str] = ()
) -> RolloutSchedule:
    prompts = (Prompt(f"g{number}", {}) for number in count())
    find = {uid: Prompt(uid, {}) for uid in known}.get
    return RolloutSchedule(
        prompts,
        find,
        group_size=size,
        validation_size=1,
        concurrency=concurrency,
        retries=retries,
        groups=groups,
    )


def tell(schedule: RolloutSchedule, pace: PacingNow | None) -> None:
    schedule.pacing_requested()
    schedule.pacing_received(pace)


def names(starts: Sequence[RolloutStart]) -> list[str]:
    return [start.prompt.uid for start in starts]


def test_nothing_starts_before_the_pool_has_said_how_it_is_nor_while_it_does_not_answer() -> None:
    schedule = make_schedule(groups=1)
    assert schedule.next_starts() == []
    tell(schedule, None)
    assert schedule.next_starts() == []
    tell(schedule, FREE)
    assert names(schedule.next_starts()) == ["g0", "g0"]


def test_no_more_run_than_the_bound_on_concurrency() -> None:
    schedule = make_schedule(size=3, concurrency=4)
    tell(schedule, FREE)
    starts = schedule.next_starts()
    assert names(starts) == ["g0", "g0", "g0", "g1"]
    schedule.ended(starts[0], COMPLETED)
    assert names(schedule.next_starts()) == ["g1"]
    assert schedule.running == 4


def test_groups_are_opened_only_as_far_as_the_pool_leaves_room() -> None:
    schedule = make_schedule(size=4)
    tell(schedule, pacing(8))
    assert names(schedule.next_starts()) == ["g0"] * 4 + ["g1"] * 4
    assert schedule.next_starts() == []


def test_what_has_started_counts_until_an_answer_that_knows_of_it() -> None:
    schedule = make_schedule(size=1)
    tell(schedule, pacing(2))
    first = schedule.next_starts()
    tell(schedule, pacing(2))  # the pool was asked before either was opened
    assert schedule.next_starts() == []
    schedule.opened(first[0])
    tell(schedule, pacing(1))
    assert schedule.next_starts() == []
    schedule.opened(first[1])
    tell(schedule, pacing(1))
    assert len(schedule.next_starts()) == 1


def test_what_starts_between_question_and_answer_counts_too() -> None:
    schedule = make_schedule(size=1)
    tell(schedule, pacing(2))
    schedule.pacing_requested()
    for start in schedule.next_starts():
        schedule.opened(start)
    schedule.pacing_received(pacing(2))
    assert schedule.next_starts() == []


def test_a_group_is_opened_whole_even_where_the_pool_has_room_for_less() -> None:
    schedule = make_schedule(size=4)
    tell(schedule, pacing(1))
    assert names(schedule.next_starts()) == ["g0"] * 4, "a batch smaller than a group would otherwise never be made"
    assert schedule.next_starts() == []


def test_what_is_nearly_complete_comes_first() -> None:
    schedule = make_schedule(size=3, concurrency=6, groups=2)
    tell(schedule, FREE)
    starts = schedule.next_starts()
    for start in starts[3:5]:
        schedule.ended(start, COMPLETED)
    schedule.ended(starts[5], ABORTED)
    schedule.ended(starts[0], ABORTED)
    assert [(start.prompt.uid, start.attempt) for start in schedule.next_starts()] == [("g1", 1), ("g0", 1)]


@pytest.mark.parametrize("status", [ABORTED, EMPTY, FAILED])
def test_a_failed_rollout_is_tried_again_and_its_group_given_up_after_the_last_try(status: RolloutStatus) -> None:
    schedule = make_schedule(size=3, retries=2, groups=1)
    tell(schedule, FREE)
    failing, other, done = schedule.next_starts()
    assert schedule.ended(done, COMPLETED) is None
    for attempt in (1, 2):
        assert schedule.ended(failing, status) is None
        (failing,) = schedule.next_starts()
        assert failing.attempt == attempt
    end = schedule.ended(failing, status)
    assert end is not None
    assert (end.prompt, end.completed, end.is_given_up, end.running) == (failing.prompt, 1, True, {other})
    assert not schedule.is_over, "one is still running"
    assert schedule.ended(other, None) is None
    assert schedule.is_over


def test_a_group_ends_when_its_last_rollout_does() -> None:
    schedule = make_schedule(groups=1)
    tell(schedule, FREE)
    first, second = schedule.next_starts()
    assert schedule.ended(first, COMPLETED) is None
    end = schedule.ended(second, COMPLETED)
    assert end is not None
    assert (end.prompt, end.completed, end.is_given_up, end.running) == (second.prompt, 2, False, set())
    assert schedule.ended(second, None) is None
    assert schedule.is_over


def test_a_rollout_that_the_pool_let_go_is_not_tried_again_nor_is_the_rest_of_its_group() -> None:
    schedule = make_schedule(size=3, concurrency=2, groups=1)
    tell(schedule, FREE)
    first, second = schedule.next_starts()
    schedule.ended(first, LATE)
    assert schedule.next_starts() == []
    end = schedule.ended(second, ABORTED)
    assert end is not None
    assert not end.is_given_up


def test_a_group_that_the_pool_wants_more_of_gets_as_many_as_are_missing_once() -> None:
    schedule = make_schedule(size=3, groups=1)
    tell(schedule, FREE)
    first, *lost = schedule.next_starts()
    for start in (first, *lost):
        schedule.opened(start)
    schedule.ended(first, COMPLETED)
    wanted = pacing(None, [("g0", 2)])
    tell(schedule, wanted)
    again = schedule.next_starts()
    assert names(again) == ["g0", "g0"]
    tell(schedule, wanted)  # the pool does not know of them yet
    assert schedule.next_starts() == []
    for start in lost:
        schedule.ended(start, LATE)
    assert schedule.ended(again[0], COMPLETED) is None
    assert schedule.ended(again[1], COMPLETED) is not None


def test_a_group_from_before_a_restart_is_refilled_and_a_strangers_is_not() -> None:
    schedule = make_schedule(groups=0, known=["before"])
    tell(schedule, pacing(0, [("before", 1), ("stranger", 3)]))
    (start,) = schedule.next_starts()
    assert start.prompt.uid == "before"
    assert not schedule.is_over
    schedule.ended(start, COMPLETED)
    assert schedule.is_over


def test_a_group_that_was_given_up_is_not_refilled() -> None:
    schedule = make_schedule(size=1, retries=0, groups=1, known=["g0"])
    tell(schedule, FREE)
    (start,) = schedule.next_starts()
    schedule.ended(start, ABORTED)
    tell(schedule, pacing(None, [("g0", 1)]))
    assert schedule.next_starts() == []


def test_validation_is_started_first_and_does_not_count_for_pacing() -> None:
    schedule = make_schedule(size=2, concurrency=5)
    schedule.validate([Prompt(f"v{number}", {}) for number in range(3)])
    tell(schedule, pacing(2))
    starts = schedule.next_starts()
    assert names(starts) == ["v0", "v1", "v2", "g0", "g0"]
    assert [start.is_validation for start in starts] == [True] * 3 + [False] * 2
    for start in starts[:3]:
        assert schedule.is_validating
        schedule.ended(start, COMPLETED)
    assert not schedule.is_validating


def test_a_stopped_plan_finishes_what_is_open() -> None:
    schedule = make_schedule(size=2, concurrency=1)
    tell(schedule, FREE)
    (first,) = schedule.next_starts()
    schedule.stop()
    schedule.ended(first, COMPLETED)
    (second,) = schedule.next_starts()
    assert second.prompt.uid == "g0"
    schedule.ended(second, COMPLETED)
    assert schedule.is_over
    assert schedule.next_starts() == []


class ToyPool:
    """Counts rollouts as the pool does, and may answer late."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.in_flight = self.queued = 0

    def pace(self) -> PacingNow:
        return pacing(max(0, self.room - self.in_flight - self.queued))


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_the_pools_room_is_never_exceeded_whatever_the_order_of_events(
    data: st.DataObject, size: int, batches: int
) -> None:
    schedule, pool = make_schedule(size=size, retries=100), ToyPool(size * batches)
    running: deque[RolloutStart] = deque()
    opened: deque[RolloutStart] = deque()
    answers: deque[PacingNow] = deque()
    for _ in range(60):
        event = data.draw(st.sampled_from(["ask", "count", "answer", "start", "open", "complete", "abort", "train"]))
        if event == "ask" and not answers:
            schedule.pacing_requested()
            answers.append(pacing(-1))
        elif event == "count" and answers:
            answers[0] = pool.pace()
        elif event == "answer" and answers and answers[0].may_start != -1:
            schedule.pacing_received(answers.popleft())
        elif event == "start":
            running.extend(schedule.next_starts())
        elif event == "open" and running:
            pool.in_flight += 1
            opened.append(running.popleft())
            schedule.opened(opened[-1])
        elif event in ("complete", "abort") and opened:
            pool.in_flight -= 1
            pool.queued += event == "complete"
            schedule.ended(opened.popleft(), COMPLETED if event == "complete" else ABORTED)
        elif event == "train" and pool.queued >= size:
            pool.queued -= size
        assert pool.in_flight + pool.queued + len(running) <= pool.room
