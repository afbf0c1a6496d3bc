"""T11: a pool without max_staleness ships data of any age, and its pacing does not hold rollouts back for it either; a
pool that holds them back says what it waits for."""

from rig.builders import EasyPool
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import merge_pacing


def queue_rollouts(pool: EasyPool, count: int) -> EasyPool:
    for n in range(count):
        pool.rollout(f"t{n}", f"p{n}")
    return pool


def test_rollouts_may_start_while_many_are_queued_if_data_may_be_of_any_age() -> None:
    pool = queue_rollouts(EasyPool(Limits()), 11)
    assert pool.take(1) is not None, "now the batch size is known"
    pacing = pool.pacing("train")
    assert (pacing.queued, pacing.may_start, pacing.waits_for) == (10, None, "")
    assert merge_pacing([pacing, pacing], None).may_start is None


def test_a_pool_that_lets_nothing_start_says_why() -> None:
    pool = queue_rollouts(EasyPool(Limits(batch_size=4, max_staleness=1)), 10)
    pacing = pool.pacing("train")
    assert pacing.may_start == 0
    assert pacing.waits_for == (
        "10 complete rollouts wait for the trainer and 0 run; together they may be 8: 4 a batch, with max_staleness 1"
    )


def test_a_pool_that_lets_some_start_waits_for_nothing() -> None:
    assert queue_rollouts(EasyPool(Limits(batch_size=4, max_staleness=1)), 7).pacing("train").waits_for == ""
