"""Marks of steps on their way to a pool that is away, refuses them, or answers."""

from collections.abc import Sequence

import pytest
from stepwell.gateway.recording.call_book import StepMarks
from stepwell.gateway.response_writer import Sighting
from stepwell.steps.trainable import UNSEEN

from rig.local_pool import LocalPool
from stepwell.errors import PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.producing import READ, TrajectoryRef

REF, OTHER = TrajectoryRef("t", "p"), TrajectoryRef("other", "p")
Told = tuple[str, list[str], str]


class MarkedPool(LocalPool):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.failures: list[Exception] = []
        """Of the next calls."""

    async def mark_unseen(self, trajectory_uid: str, prompt_uid: str, step_uids: Sequence[str], reason: str) -> None:
        if self.away:
            raise PoolUnavailable("away")
        if self.failures:
            raise self.failures.pop()
        self.told.append((trajectory_uid, list(step_uids), reason))


@pytest.fixture
def marked() -> MarkedPool:
    return MarkedPool()


def marks_of(pool: MarkedPool, max_waiting: int = 100) -> StepMarks:
    return StepMarks(pool, retry_pause=0.001, max_waiting=max_waiting)


async def test_a_mark_is_sent_until_the_pool_has_it(marked: MarkedPool) -> None:
    marked.failures = [PoolUnavailable("away")] * 3
    marks = marks_of(marked)
    marks.add(REF, ["a", "b"], UNSEEN)
    await marks.settle("t", 30.0)
    assert marked.told == [("t", ["a", "b"], UNSEEN)]
    assert (marks.told, marks.lost) == ({UNSEEN: 2}, {})


async def test_a_trajectory_waits_for_its_own_marks_only_and_not_for_ever(marked: MarkedPool) -> None:
    marked.away = True
    marks = marks_of(marked)
    marks.add(REF, ["a"], UNSEEN)
    await marks.settle("other", 0.0)
    for trajectory_uid in ("t", None):
        with pytest.raises(PoolUnavailable, match="1 marks of steps still wait for the pool"):
            await marks.settle(trajectory_uid, 0.01)
    marked.away = False
    await marks.settle(None, 30.0)
    assert marks.told == {UNSEEN: 1}


async def test_what_is_refused_and_what_is_too_much_is_counted(marked: MarkedPool) -> None:
    marks = marks_of(marked, max_waiting=2)
    marked.failures = [UnknownTrajectory("there is none")]
    for n, ref in enumerate((REF, OTHER, REF)):
        marks.add(ref, [str(n)], UNSEEN)
    await marks.settle(None, 30.0)
    assert marks.lost == {"refused": 1, "full": 1}
    assert marked.told == [("other", ["1"], UNSEEN)]


@pytest.mark.parametrize(
    ("readers", "expected"),
    [
        ([True], []),
        ([True, False], []),
        ([False], [UNSEEN]),
        ([False, False], [UNSEEN]),
        ([False, True, False], [UNSEEN, READ]),
    ],
)
async def test_one_who_read_an_answer_is_enough(readers: list[bool], expected: list[str]) -> None:
    told: list[str] = []
    sighting = Sighting(lambda uids, mark: told.append(mark), ["a"], is_whole=True)
    for is_read in readers:
        sighting.note(is_read=is_read)
    assert told == expected


async def test_an_error_in_place_of_the_end_is_no_answer_that_was_read() -> None:
    told: list[str] = []
    Sighting(lambda uids, mark: told.append(mark), ["a"]).note(is_read=True)
    Sighting(lambda uids, mark: told.append(mark), []).note(is_read=False)
    assert told == [UNSEEN]
