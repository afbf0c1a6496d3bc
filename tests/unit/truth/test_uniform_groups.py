"""T11: a group whose rollouts are all the same, as with a fixed seed, is counted and said."""

import logging

import pytest
from stepwell.pool.slices.producing import AddSteps, Complete, Register

from rig.asked import asked, trained
from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.shard.service import ShardService
from stepwell.steps.columns import pack


def send(pool: EasyPool, prompt: str, *responses: list[int]) -> None:
    for n, response in enumerate(responses):
        pool.rollout(f"{prompt}-{n}", prompt, size=len(responses), response_ids=response)


@pytest.mark.parametrize(
    ("responses", "count"),
    [([[3, 4], [3, 4], [3, 4]], 1), ([[3, 4], [3, 4], [3, 5]], 0), ([[3, 4], [3, 4, 5]], 0), ([[3, 4]], 0)],
    ids=["all the same", "two of three", "one is longer", "a single one"],
)
def test_a_group_of_equal_rollouts_is_counted(responses: list[list[int]], count: int) -> None:
    pool = EasyPool(Limits())
    send(pool, "p", *responses)
    assert pool.take(1) is not None
    assert pool.stats().uniform_groups == count


def test_a_group_that_comes_back_is_counted_once() -> None:
    pool = EasyPool(Limits())
    send(pool, "p", [3, 4], [3, 4])
    leased = pool.lease(1)
    assert leased is not None
    pool.leasing.nack(leased[0])
    assert pool.take(1) is not None
    assert pool.stats().uniform_groups == 1


async def test_it_is_said_in_the_log_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    service = ShardService(PoolPlan(), "data_pool")
    with caplog.at_level(logging.WARNING, logger="stepwell.pool"):
        for prompt in ("a", "b", "c", "d"):
            for n in range(2):
                uid = f"{prompt}-{n}"
                await service.run([Register(Registration(uid, prompt, "train", 2))])
                await asked(service, AddSteps(pack([make_step(uid, prompt)])))
                await service.run([Complete(uid, prompt, 1.0)])
            await trained(service)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" groups")[0] for text in said] == [f"shard data_pool: in {count}" for count in (1, 2, 4)]
    assert "do the agents send a fixed seed" in said[0]
