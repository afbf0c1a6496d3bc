"""How long the pool has run since a moment of the wall clock, whatever the clock says in between."""

from stepwell.pool.state.tombstones import MARKS_KEPT, RunningTime

DAY = 86_400.0
START = 1_800_000_000.0


class Clocks:
    def __init__(self) -> None:
        self.running = RunningTime()
        self.now, self.pool_time = START, 5_000.0
        self.pass_by(0.0)

    def pass_by(self, seconds: float) -> None:
        """The pool runs."""
        self.set(self.now + seconds, ran=seconds)

    def set(self, now: float, ran: float = 0.0) -> None:
        self.now, self.pool_time = now, self.pool_time + ran
        self.running.advance(self.now, self.pool_time)


def test_time_that_the_pool_runs_counts() -> None:
    clocks = Clocks()
    for _ in range(10):
        clocks.pass_by(3 * DAY)
    assert clocks.running.since(START) == 30 * DAY
    assert clocks.running.since(START + 20 * DAY) == 10 * DAY
    assert len(clocks.running.marks) == 1


def test_a_clock_that_is_ahead_makes_nothing_old_neither_then_nor_afterwards() -> None:
    clocks = Clocks()
    clocks.pass_by(DAY)
    clocks.set(clocks.now + 60 * DAY)
    clocks.pass_by(60.0)
    assert clocks.running.since(START) == DAY + 60.0
    clocks.set(clocks.now - 60 * DAY)
    clocks.pass_by(DAY)
    assert clocks.running.since(START) == 2 * DAY + 60.0
    assert clocks.running.since(START + DAY) == DAY + 60.0
    assert clocks.running.since(START + DAY + 60.0) == DAY
    assert clocks.running.since(clocks.now) == 0.0


def test_time_off_does_not_count_and_what_came_later_is_as_old_as_the_clock_says() -> None:
    clocks = Clocks()
    clocks.pass_by(DAY)
    clocks.set(clocks.now + 60 * DAY)
    clocks.pass_by(10 * DAY)
    assert clocks.running.since(START) == 11 * DAY
    assert clocks.running.since(START + 30 * DAY) == 10 * DAY, "of a moment at which it was off"
    assert clocks.running.since(START + 66 * DAY) == 5 * DAY


def test_what_came_before_the_first_mark_counts_from_there() -> None:
    clocks = Clocks()
    clocks.pass_by(DAY)
    assert clocks.running.since(START - 40 * DAY) == DAY


def test_a_clock_that_a_person_trusts_counts_from_then_on_as_before() -> None:
    clocks = Clocks()
    clocks.set(clocks.now + 60 * DAY)
    clocks.running.trust_clock()
    assert clocks.running.since(START) == 60 * DAY
    clocks.set(clocks.now + 60 * DAY)
    assert clocks.running.since(START) == 60 * DAY
    assert clocks.running.since(START - 40 * DAY) == 100 * DAY


def test_marks_are_kept_over_a_restart_and_only_the_last_ones() -> None:
    clocks = Clocks()
    for _ in range(2 * MARKS_KEPT):
        clocks.set(clocks.now + DAY, ran=60.0)
    again = RunningTime()
    again.load([list(mark) for mark in clocks.running.marks])
    again.advance(clocks.now, clocks.pool_time)
    assert again.marks == clocks.running.marks
    assert len(again.marks) == MARKS_KEPT
    assert again.since(START) == 60.0 * (MARKS_KEPT - 1), "less than it was: data is kept longer, never shorter"
