import pytest

from stepwell.envs.tracking import FailureCount
from stepwell.errors import EnvironmentFailed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failure_count(failures: int = 3) -> tuple[FailureCount, Clock]:
    clock = Clock()
    return FailureCount(failures, first_pause=1.0, longest_pause=4.0, clock=clock), clock


def test_groups_that_were_under_way_together_fail_as_one() -> None:
    counts, clock = failure_count()
    began_at = clock.now
    clock.now += 1
    for _ in range(10):
        counts.fail("collect", ValueError(), began_at)
    assert counts.in_a_row == 1
    assert counts.dropped == {"collect": 10}
    counts.fail("collect", ValueError(), clock.now)
    assert counts.in_a_row == 2


def test_a_success_begins_a_new_row() -> None:
    counts, clock = failure_count(failures=2)
    counts.fail("collect", ValueError(), clock.now)
    counts.succeed()
    counts.fail("collect", ValueError(), clock.now)
    counts.check()
    counts.fail("collect", ValueError("the end"), clock.now)
    with pytest.raises(EnvironmentFailed, match="2 failures in a row, the last one in collect: ValueError: the end"):
        counts.check()


def test_the_next_work_waits_longer_with_every_failure_up_to_a_bound() -> None:
    counts, clock = failure_count()
    for pause in (1.0, 2.0, 4.0, 4.0):
        counts.fail("collect", ValueError(), clock.now)
        clock.now += pause - 0.01
        assert counts.is_pausing
        clock.now += 0.02
        assert not counts.is_pausing


def test_a_traceback_is_logged_once_for_each_place(caplog: pytest.LogCaptureFixture) -> None:
    counts, _ = failure_count()

    def fail(place: int) -> None:
        if place == 0:
            raise ValueError("here")
        raise ValueError("there")

    for place in (0, 0, 1, 0):
        with counts.catching("evaluate"):
            fail(place)
    assert [record.getMessage().split(";")[0] for record in caplog.records if record.exc_info] == [
        "evaluate: ValueError: here",
        "evaluate: ValueError: there",
    ]
    assert counts.dropped == {"evaluate": 4}
    assert counts.in_a_row == 0
