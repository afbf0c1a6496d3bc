"""D13: questions to all shards are answered without the shard that is away, and name it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx
import pytest
from stepwell.dashboard.follower import ConversationTexts, PoolFollower
from stepwell.exports.pool_transfer import all_changes

from rig.atropos.server import ENVIRONMENT, TRAINER, serve_atropos
from rig.builders import make_step
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.common.async_calls import Backoff
from stepwell.dashboard.index import TrajectoryIndex
from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.pool.api.leasing import HasLeases
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict

T = TypeVar("T")

SHARDS = 4
AWAY = "data_pool-2"
BOUND = 2.0
"""Seconds."""


@pytest.fixture(params=["stopped", "killed"])
async def pool(request: pytest.FixtureRequest) -> LocalPool:
    """Two rollouts on each shard are queued. Then one shard goes away."""
    pool = LocalPool(shards=SHARDS, part_timeout=0.2, batch_size=16, max_staleness=1)
    prompts = [f"p{n}" for n in range(40)]
    for index in range(SHARDS):
        for prompt in [prompt for prompt in prompts if Layout(1, SHARDS).owner(prompt) == index][:2]:
            await pool.register_trajectory(Registration(f"t-{prompt}", prompt))
            assert await pool.submit_steps([make_step(f"t-{prompt}", prompt)]) == [SubmitVerdict.ACCEPTED]
            assert await pool.complete_trajectory(f"t-{prompt}", prompt, 1.0) is EndResult.COMPLETED
    assert (await pool.pacing("train")).queued == 2 * SHARDS
    away = pool.transport.shards_stopped if request.param == "stopped" else pool.transport.shards_away
    away.add(AWAY)
    return pool


def come_back(pool: LocalPool) -> None:
    pool.transport.shards_stopped.clear()
    pool.transport.shards_away.clear()


async def in_time(call: Awaitable[T]) -> T:
    began = time.monotonic()
    answer = await call
    assert time.monotonic() - began < BOUND
    return answer


async def test_the_statistics_count_the_other_shards(pool: LocalPool) -> None:
    stats = await in_time(pool.stats())
    assert stats.missing == (AWAY,)
    assert stats.channels["train"].ready_groups == 2 * (SHARDS - 1)
    come_back(pool)
    assert (await pool.stats()).missing == ()


async def test_a_shard_that_takes_more_than_a_second_is_slow_and_not_missing() -> None:
    pool = LocalPool(shards=SHARDS)
    pool.transport.shards_stopped.add(AWAY)
    asyncio.get_running_loop().call_later(1.1, pool.transport.shards_stopped.clear)
    assert (await in_time(pool.stats())).missing == ()


async def test_pacing_counts_the_last_known_numbers_of_the_shard(pool: LocalPool) -> None:
    pacing = await in_time(pool.pacing("train"))
    assert pacing.missing == (AWAY,)
    assert (pacing.queued, pacing.may_start) == (8, 24)


async def test_a_new_client_needs_no_particular_shard() -> None:
    pool = LocalPool(shards=SHARDS, part_timeout=0.2)
    pool.transport.shards_stopped.add("data_pool")
    assert (await in_time(pool.stats())).missing == ("data_pool",)


async def test_the_version_reaches_the_shard_when_it_is_back(pool: LocalPool) -> None:
    await in_time(pool.set_policy_version(7))
    await in_time(pool.set_policy_version(8))
    versions = {name: service.pool.policy_version for name, service in pool.transport.services.items()}
    assert versions == {"data_pool": 8, "data_pool-1": 8, AWAY: 0, "data_pool-3": 8}
    come_back(pool)
    await until(lambda: pool.transport.services[AWAY].pool.policy_version == 8, "the version to arrive")


async def test_a_version_that_a_shard_refuses_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(version: int, withdrawn: int | None) -> None:
        raise BadRequest("no such version")

    pool = LocalPool(shards=SHARDS, part_timeout=0.2)
    monkeypatch.setattr(pool.transport.services["data_pool-1"], "set_policy_version", refuse)
    with pytest.raises(BadRequest, match="no such version"):
        await pool.set_policy_version(7)


async def test_a_watcher_follows_the_other_shards_and_catches_up_when_the_shard_is_back(pool: LocalPool) -> None:
    changes = await in_time(pool.changes({}))
    assert (changes.missing, len(changes.snapshots)) == ((AWAY,), 2 * (SHARDS - 1))
    assert (await in_time(pool.series(seconds=60))).missing == (AWAY,)
    assert (await in_time(pool.audit())).missing == (AWAY,)
    come_back(pool)
    later = await pool.changes(changes.cursors)
    assert (later.missing, {snapshot.shard for snapshot in later.snapshots}) == ((), {AWAY})


async def test_a_trainer_gets_the_groups_of_the_other_shards_without_delay(pool: LocalPool) -> None:
    began = time.monotonic()
    for _ in range(2):
        batch = await pool.fetch_batch(1, lease=60.0)
        assert pool.transport.services[AWAY].pool.state.trajectories.keys().isdisjoint(batch.columns.trajectory_uids)
    assert time.monotonic() - began < 2.5


class StopsAtTake(LocalTransport):
    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method in ("take", "take_offers") and not self.shards_stopped:
            self.shards_stopped.add(shard)
        return await super().call(shard, method, args, kwargs)


@pytest.mark.parametrize(
    "take",
    [
        lambda pool: pool.fetch_batch(1, timeout=20.0, lease=60.0),
        lambda pool: pool.fill_batch(1, channel="train", shares={}, lease=60.0),
    ],
    ids=["fetch", "fill"],
)
async def test_a_shard_that_stops_while_it_is_taken_from_is_given_up_in_time(
    take: Callable[[LocalPool], Awaitable[HasLeases]],
) -> None:
    pool = LocalPool(shards=2, transport=StopsAtTake, part_timeout=0.1)
    for prompt in [next(prompt for prompt in "abcdefgh" if Layout(1, 2).owner(prompt) == index) for index in range(2)]:
        await pool.register_trajectory(Registration(f"t-{prompt}", prompt))
        await pool.submit_steps([make_step(f"t-{prompt}", prompt, is_last=True)])
    async with asyncio.timeout(15.0):
        batch = await take(pool)
    (shard,) = {shard for shard, _ in batch.leases}
    assert pool.transport.shards_stopped == {"data_pool", "data_pool-1"} - {shard}
    come_back(pool)


async def test_the_dashboard_names_the_shard_and_shows_the_others(pool: LocalPool) -> None:
    follower = PoolFollower(pool, TrajectoryIndex(), ConversationTexts())
    await in_time(follower.poll())
    assert (str(follower.error).partition(";")[0], follower.behind) == (f"no answer from {AWAY}", True)
    come_back(pool)
    await follower.poll()
    assert (follower.error, follower.behind) == (None, False)


async def test_an_export_of_everything_is_refused_without_a_shard(pool: LocalPool) -> None:
    with pytest.raises(PoolUnavailable, match=f"no answer from {AWAY}"):
        await anext(all_changes(pool, Backoff(first=0.01, longest=0.01)))


async def test_a_pool_that_is_not_ready_says_so_in_time(pool: LocalPool) -> None:
    with pytest.raises(PoolUnavailable, match=f"'{AWAY}'"):
        await in_time(pool.check())


async def test_the_atropos_server_answers_and_names_the_shard(pool: LocalPool) -> None:
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/register", json=TRAINER)
        await client.get("/batch")
        env_id = (await client.post("/register-env", json=ENVIRONMENT)).json()["env_id"]
        status = (await in_time(client.get("/status"))).json()  # the batch took four of six groups
        assert status == {"current_step": status["current_step"], "queue_size": 2, "missing": [AWAY]}
        of_env = (await in_time(client.request("GET", "/status-env", json={"env_id": env_id}))).json()
        assert of_env["missing"] == [AWAY]
        come_back(pool)
        assert "missing" not in (await client.get("/status")).json()


@pytest.mark.parametrize(
    "ask",
    [lambda pool: pool.stats(), lambda pool: pool.pacing("train"), lambda pool: pool.ready_groups("train")],
    ids=["stats", "pacing", "ready_groups"],
)
async def test_a_pool_of_which_no_shard_answers_is_waited_for(ask: Callable[[LocalPool], Awaitable[object]]) -> None:
    pool = LocalPool(shards=2, part_timeout=0.05)
    pool.transport.shards_away.update(pool.plan.shard_names())
    asking = asyncio.ensure_future(ask(pool))
    done, _ = await asyncio.wait([asking], timeout=0.2)
    assert not done
    come_back(pool)
    await asking
