"""A channel with an adapter has a version of its own: its steps age by it, and other versions do not matter to it."""

from rig.builders import EasyPool, make_step
from rig.local_pool import LocalPool
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.policy import ChannelPolicy, PolicyDecision, Serving
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.stats import StepCount
from stepwell.pool.shard.resharding import reshard
from stepwell.pool.state.ledger import load_serving
from stepwell.steps.step import Step


def rollout(pool: EasyPool, uid: str, channel: str, version: int) -> None:
    pool.register(Registration(uid, uid, channel))
    pool.submit([make_step(uid, uid, policy_version=version)])
    pool.complete(uid, uid, 1.0)


def uids(groups: list[list[Step]] | None) -> list[str]:
    return [step.trajectory_uid for group in groups or [] for step in group]


def test_steps_age_by_the_version_of_their_own_channel() -> None:
    pool = EasyPool(Limits(max_staleness=1))
    rollout(pool, "east1", "east", 1)
    rollout(pool, "east4", "east", 4)
    rollout(pool, "west1", "west", 1)
    pool.state.set_adapter("east", "east-v5", 5)
    pool.state.set_adapter("west", "west-v1", 1)
    assert uids(pool.take(1, "east")) == ["east4"]
    assert uids(pool.take(1, "west")) == ["west1"]
    assert pool.stats().channels["east"].dropped == {"stale": StepCount(1, 4)}
    assert pool.stats().channels["west"].dropped == {}


def test_a_channel_without_an_adapter_ages_by_the_pools_version() -> None:
    pool = EasyPool(Limits(max_staleness=0))
    pool.state.set_adapter("east", "east-v5", 5)
    pool.state.pause_channel("west", paused=True)
    pool.policy_version = 2
    rollout(pool, "old", "west", 1)
    rollout(pool, "new", "west", 2)
    assert uids(pool.take(1, "west")) == ["new"]


def test_a_withdrawn_version_of_the_pool_is_no_version_of_an_adapter() -> None:
    pool = EasyPool(Limits())
    pool.state.set_adapter("east", "east-v4", 4)
    pool.decide(PolicyDecision(4, "refuse", "guard", "why", 1.0), None, None)
    rollout(pool, "east4", "east", 4)
    rollout(pool, "west4", "west", 4)
    rollout(pool, "west3", "west", 3)
    assert uids(pool.take(1, "east")) == ["east4"]
    assert uids(pool.take(1, "west")) == ["west3"]


def test_a_new_adapter_does_not_end_a_pause() -> None:
    pool = EasyPool(Limits())
    pool.state.pause_channel("east", paused=True)
    pool.state.set_adapter("east", "east-v1", 1)
    assert pool.state.serving.channel("east") == ChannelPolicy("east", "east-v1", 1, paused=True)
    pool.state.pause_channel("east", paused=False)
    assert pool.state.serving.channel("east") == ChannelPolicy("east", "east-v1", 1)


def test_a_journal_keeps_the_adapters() -> None:
    pool = EasyPool(Limits())
    pool.state.set_adapter("west", "west-v2", 2)
    pool.state.set_adapter("east", "east-v1", 1)
    pool.state.pause_channel("east", paused=True)
    snapshot = pool.state.snapshot()
    assert load_serving(snapshot).channels == pool.state.serving.channels


def test_a_change_is_a_new_revision_and_the_same_again_is_none() -> None:
    pool = EasyPool(Limits())
    pool.state.set_adapter("east", "east-v1", 1)
    first = pool.state.serving
    pool.state.set_adapter("east", "east-v1", 1)
    assert pool.state.serving == first
    assert Serving().is_older_than(first)


async def test_all_shards_know_the_adapters_also_new_ones() -> None:
    pool = LocalPool(shards=2)
    await pool.set_adapter("east", "east-v3", 3)

    async def start(plan: PoolPlan, changed: PoolPlan) -> None:
        pool.add_shards(plan, changed)

    await reshard(pool.transport, await pool.shards.plan(), 3, start)
    known = [service.pool.state.serving.version_of("east") for service in pool.transport.services.values()]
    assert known == [3, 3, 3]
    assert await pool.channel_policy("east") == ChannelPolicy("east", "east-v3", 3)
