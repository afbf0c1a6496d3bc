import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rig.asked import asked
from rig.builders import make_step
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.errors import FetchTimeout, PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.client import DataPool
from stepwell.pool.shard.service import ShardService
from stepwell.pool.slices.policy import ChangeEngines

SHARDS = 4


@pytest.fixture
def client() -> LocalPool:
    return LocalPool(shards=SHARDS)


async def rollout(client: LocalPool, prompt: str) -> None:
    uid = f"t-{prompt}"
    await client.register_trajectory(Registration(uid, prompt))
    assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


async def test_rollouts_that_begin_and_end_at_once_are_answered_each_for_itself(client: LocalPool) -> None:
    async def stranger(n: int) -> None:
        with pytest.raises(UnknownTrajectory, match=f"no trajectory stranger{n} "):
            await client.complete_trajectory(f"stranger{n}", f"p{n}", None)

    await asyncio.gather(*(rollout(client, f"p{n}") for n in range(100)), *(stranger(n) for n in range(100)))
    assert {step.prompt_uid for step in (await client.fetch_batch(100)).steps()} == {f"p{n}" for n in range(100)}


class SlowTransport(LocalTransport):
    """Producer calls wait until they may be answered."""

    def __init__(self, services: dict[str, ShardService]) -> None:
        super().__init__(services)
        self.may_answer = asyncio.Event()
        self.calls: list[tuple[str, int]] = []
        """The shard of each message, and how many calls it had."""

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method == "run":
            self.calls.append((shard, len(args[0])))
            await self.may_answer.wait()
        return await super().call(shard, method, args, kwargs)


async def test_calls_share_messages_to_a_shard_and_no_shard_waits_for_another() -> None:
    client = LocalPool(shards=2, transport=SlowTransport)
    prompts = [f"p{n}" for n in range(10)]
    owners = [await client.shards.owner(prompt) for prompt in prompts]
    knowing = [asyncio.create_task(client.channel_if_open("t", prompt)) for prompt in prompts]
    await until(lambda: {shard for shard, _ in client.transport.calls} == set(owners), "a message to each shard")
    late = [asyncio.create_task(client.channel_if_open("t", prompt)) for prompt in prompts]
    await asyncio.sleep(0)
    client.transport.may_answer.set()
    assert await asyncio.gather(*knowing, *late) == [None] * 20
    assert sum(size for _, size in client.transport.calls) == 20
    assert len(client.transport.calls) == 4


async def test_a_call_behind_a_message_that_hangs_is_given_up_in_time() -> None:
    client = LocalPool(transport=SlowTransport, timeout=0.05)
    with pytest.raises(PoolUnavailable, match=r"DataPool 'data_pool': no answer within 0.05 s"):
        await client.channel_if_open("t", "p")
    client.transport.may_answer.set()
    assert not await client.channel_if_open("t", "p")


async def test_rewards_come_late_pacing_adds_up_and_the_version_reaches_every_shard(client: LocalPool) -> None:
    for prompt in ("p0", "p1"):
        await rollout(client, prompt)
    assert await client.give_reward(RewardGiven(trajectory_uid="t-p0", prompt_uid="p0", value=0.25, source="judge"))
    batch = await client.fetch_batch(2)
    sources = dict(zip(batch.columns.prompt_uids, batch.columns.reward_sources, strict=True))
    assert sources == {"p0": "judge", "p1": "completion"}
    assert (await client.pacing("train")).batch == 2
    await client.set_policy_version(5)
    services = client.transport.services.values()
    assert [(await service.serving()).policy_version for service in services] == [5] * SHARDS


async def test_a_new_policy_version_reaches_a_follower_at_once(client: LocalPool) -> None:
    following = asyncio.create_task(client.follow())
    await asyncio.sleep(0)
    await client.transport.services["data_pool"].set_policy_version(7)
    await until(lambda: client.policy_version == 7, "the version to arrive")
    following.cancel()


class HeldNews(LocalTransport):
    """Answers of news are on their way until they are let through."""

    def __init__(self, services: dict[str, ShardService]) -> None:
        super().__init__(services)
        self.held: list[asyncio.Event] = []

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        answer = await super().call(shard, method, args, kwargs)
        if method == "wait_news":
            self.held.append(asyncio.Event())
            await self.held[-1].wait()
        return answer


async def let_through(client: LocalPool) -> None:
    """The oldest answer; the next one is then on its way."""
    held = client.transport.held
    count = len(held)
    held[-1].set()
    await until(lambda: len(held) > count, "the follower to ask again")


async def test_an_answer_that_was_on_its_way_does_not_undo_a_newer_change() -> None:
    client = LocalPool(transport=HeldNews)
    following = asyncio.create_task(client.follow())
    await until(lambda: client.transport.held != [], "an answer on its way")
    await client.change_engines(add=("http://a",))
    await client.set_policy_version(3)

    await let_through(client)

    assert client.serving is not None
    assert client.serving.engines == ("http://a",)
    assert client.policy_version == 3
    following.cancel()


async def test_a_change_of_the_version_does_not_hide_a_change_of_the_engines() -> None:
    client, service = LocalPool(transport=HeldNews), "data_pool"
    following = asyncio.create_task(client.follow())
    await until(lambda: client.transport.held != [], "an answer on its way")
    await asked(client.transport.services[service], ChangeEngines(("http://a",)))
    await client.set_policy_version(3)
    assert client.serving is not None
    assert client.serving.engines == ("http://a",), "the version came with an old list"
    following.cancel()


async def test_a_shard_that_lost_its_state_with_its_process_is_believed() -> None:
    client = LocalPool()
    following = asyncio.create_task(client.follow())
    for version in range(1, 4):
        await client.set_policy_version(version)
    services = dict(client.transport.services)
    ended = client.transport.services["data_pool"]
    client.transport.services = services | {"data_pool": ShardService(client.plan, "data_pool")}
    await ended.set_policy_version(4)  # ends the wait there
    await until(lambda: client.policy_version == 0, "the new process's answer")
    following.cancel()


async def test_steps_come_out_as_they_went_in(client: LocalPool) -> None:
    await client.register_trajectory(Registration("t", "p"))
    steps = [make_step(uid=str(i), started_at=i, prompt_ids=range(i + 1)) for i in range(40)]
    assert await client.submit_steps(steps) == [SubmitVerdict.ACCEPTED] * 40
    await client.complete_trajectory("t", "p", 0.25)
    (((*trajectory,),),) = (await client.fetch_batch(1)).groups()
    assert [step.uid for step in trajectory] == [step.uid for step in steps]
    assert all((a.prompt_ids == b.prompt_ids).all() for a, b in zip(steps, trajectory, strict=True))
    assert [step.reward for step in trajectory] == [None] * 39 + [0.25]


async def test_a_waiting_fetch_returns_as_soon_as_a_group_is_ready() -> None:
    client = LocalPool()
    fetching = asyncio.create_task(client.fetch_batch(1, timeout=20.0))
    await asyncio.sleep(0)
    await rollout(client, "p")
    assert len(await fetching) == 1


async def test_a_fetch_that_times_out_says_what_it_waited_for() -> None:
    client = LocalPool()
    await client.register_trajectory(Registration("t", "p", group_size=4))
    with pytest.raises(FetchTimeout, match=r"^waited 0.1 s for 1 ready groups .* 0 of 4 trajectories complete") as info:
        await client.fetch_batch(1, timeout=0.1)
    assert "\n" not in str(info.value)


async def test_a_shard_that_comes_back_is_waited_for_and_one_that_does_not_is_named() -> None:
    client = LocalPool(timeout=0.5)
    client.transport.shards_away.add("data_pool")
    stats = asyncio.create_task(client.stats())
    await asyncio.sleep(0)
    client.transport.shards_away.clear()
    assert (await stats).submitted == 0
    client.transport.shards_away.add("data_pool")
    with pytest.raises(PoolUnavailable, match=r"'data_pool': no stats within 0.5 s; it is away \(killed\)"):
        await client.stats()


def test_a_batch_is_acknowledged_on_leaving_its_block_and_given_back_on_an_exception(client: LocalPool) -> None:
    pool = DataPool(client)
    for prompt in ("p0", "p1", "p2"):
        client.advance_to(float(prompt[1]))
        pool._run(rollout(client, prompt))
    with pytest.raises(ZeroDivisionError), pool.batch(2):
        raise ZeroDivisionError
    with pool.batch(3) as batch:
        attempts = zip(batch.columns.prompt_uids, batch.attempts_G.tolist(), strict=True)
        assert sorted(attempts) == [("p0", 1), ("p1", 1), ("p2", 0)]
    assert pool.stats().channels["train"].shipped.steps == 3
    assert pool.stats().leases == 0
