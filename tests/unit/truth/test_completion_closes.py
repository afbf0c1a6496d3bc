"""S3: completion closes a trajectory to its agent. Calls in flight have a bounded grace; what comes later is neither
trained nor changes a reward."""

from pathlib import Path

import pytest

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client.batch import batch_of
from tests.unit.pool.shard.journals import kill, open_pool, save

COMPLETED_AT = 100.0


def completed(pool: EasyPool) -> EasyPool:
    pool.advance(COMPLETED_AT)
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="0", started_at=90.0)])
    pool.complete("t", "p", 1.0)
    return pool


def late_step(pool: EasyPool, *, began: float, arrives: float) -> SubmitVerdict:
    pool.advance(arrives)
    return pool.submit([make_step(uid="late", started_at=began)])[0]


@pytest.mark.parametrize(
    ("began", "arrives", "verdict"),
    [
        (99.0, 101.0, SubmitVerdict.ACCEPTED),
        (99.0, 130.0, SubmitVerdict.ACCEPTED),
        (99.0, 131.0, SubmitVerdict.LATE),
        (105.0, 106.0, SubmitVerdict.LATE),
    ],
    ids=["in flight", "at the end of the grace", "after the grace", "begun after the completion"],
)
def test_a_completed_trajectory_takes_only_steps_of_calls_that_were_in_flight(
    began: float, arrives: float, verdict: SubmitVerdict
) -> None:
    pool = completed(EasyPool(Limits(completion_grace=30.0)))
    assert late_step(pool, began=began, arrives=arrives) is verdict
    assert pool.stats().in_grace == (verdict is SubmitVerdict.ACCEPTED)
    assert pool.stats().refused == ({} if verdict is SubmitVerdict.ACCEPTED else {"late": 1})


def test_a_call_after_the_completion_neither_is_trained_nor_takes_the_reward() -> None:
    pool = completed(EasyPool(Limits()))
    late_step(pool, began=105.0, arrives=106.0)
    (steps,) = pool.take(1) or [[]]
    assert [(step.uid, step.reward, step.is_last, step.trajectory_return) for step in steps] == [("0", 1.0, True, 1.0)]


def test_a_step_within_the_grace_does_not_change_the_return() -> None:
    pool = completed(EasyPool(Limits()))
    late_step(pool, began=99.0, arrives=101.0)
    leased = pool.lease(1)
    assert leased is not None
    assert batch_of(leased[1]).returns_T.tolist() == [1.0]


def test_a_completed_trajectory_is_not_known_to_gateways_any_more() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="0")])
    assert pool.channel_if_open("t", "p")
    pool.complete("t", "p")
    assert not pool.channel_if_open("t", "p")


def test_a_second_completion_does_not_open_the_grace_again() -> None:
    pool = completed(EasyPool(Limits(completion_grace=30.0)))
    pool.advance(120.0)
    pool.complete("t", "p")
    assert late_step(pool, began=99.0, arrives=131.0) is SubmitVerdict.LATE


def test_a_shard_that_restarts_remembers_when_a_trajectory_was_completed(tmp_path: Path) -> None:
    pool, journal, _ = open_pool(tmp_path / "pool.sqlite")
    completed(pool)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(tmp_path / "pool.sqlite")
    assert late_step(pool, began=99.0, arrives=101.0) is SubmitVerdict.ACCEPTED
    pool.advance(131.0)
    assert pool.submit([make_step(uid="later", started_at=99.0)]) == [SubmitVerdict.LATE]
