"""Reward workers at several shards. tests/integration/pool kills the shards meanwhile."""

import asyncio

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.scoring import Attempt, Judgement, JudgementOutcome, Score
from stepwell.steps.step import Step


async def rollout(client: LocalPool, uid: str) -> None:
    await client.register_trajectory(Registration(uid, f"p-{uid}"))
    assert await client.submit_steps([make_step(uid, f"p-{uid}", uid=uid)]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, f"p-{uid}", None) is EndResult.COMPLETED


def judgement(lease_uid: str, step: Step) -> Judgement:
    return Judgement(
        trajectory_uid=step.trajectory_uid,
        prompt_uid=step.prompt_uid,
        lease_uid=lease_uid,
        attempt=Attempt(JudgementOutcome.SCORE, Score(1.0)),
        source="test",
    )


async def test_a_worker_waits_for_whichever_shard_has_something_first() -> None:
    client = LocalPool(shards=3, require_reward=True)
    assert await client.take_unscored(1, lease=60.0, timeout=0.2) is None
    for n in range(6):
        waiting = asyncio.create_task(client.take_unscored(4, lease=60.0, timeout=30.0))
        await asyncio.sleep(0)
        await rollout(client, f"t{n}")
        taken = await waiting
        assert taken is not None
        lease_uid, trajectories = taken
        assert [[step.trajectory_uid for step in steps] for steps in trajectories] == [[f"t{n}"]]
        assert lease_uid.split("/")[0] == await client.shards.owner(f"p-t{n}")


async def test_what_is_not_judged_in_time_is_taken_again_from_a_pool_where_nothing_else_happens() -> None:
    client = LocalPool(require_reward=True)
    await rollout(client, "t1")
    first = await client.take_unscored(1, lease=0.5, timeout=10.0)
    waiting = asyncio.create_task(client.take_unscored(1, lease=60.0, timeout=10.0))
    await asyncio.sleep(0)
    client.advance_to(1.0)
    second = await waiting
    assert first is not None
    assert second is not None
    made = [judgement(lease_uid, steps[0]) for lease_uid, (steps,) in (first, second, second)]
    assert [(await client.give_judgements([one]))[0] for one in made] == [False, True, False]


async def test_a_shard_that_is_away_stops_neither_the_others_nor_the_judgements_for_them() -> None:
    client = LocalPool(shards=2, require_reward=True)
    uids = [f"t{n}" for n in range(8)]
    for uid in uids:
        await rollout(client, uid)
    taken = [await client.take_unscored(3, lease=60.0, timeout=10.0) for _ in range(2)]
    made = [judgement(found[0], steps[0]) for found in taken if found is not None for steps in found[1]]
    first, second = client.plan.shard_names()
    assert {one.lease_uid.split("/")[0] for one in made} == {first, second}, "shards are served in turn"
    client.transport.shards_away.add(second)
    assert await client.give_judgements(made) == [Layout(1, 2).owner(one.prompt_uid) == 0 for one in made]
    left = {uid for uid in uids if Layout(1, 2).owner(f"p-{uid}") == 0} - {one.trajectory_uid for one in made}
    while left:
        found = await client.take_unscored(1, lease=60.0, timeout=10.0)
        assert found is not None
        left.remove(found[1][0][0].trajectory_uid)
    client.transport.shards_away.add(first)
    with pytest.raises(PoolUnavailable):
        await client.take_unscored(1, lease=60.0, timeout=0.05)
