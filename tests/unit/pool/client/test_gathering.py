"""Several processes send through one link: here several clients through one transport."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.common.message_format import message
from stepwell.errors import BadRequest
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.api.transport import ActorAway, ActorFailed
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link_messages import LARGEST_MESSAGE, GatheringTransport
from stepwell.pool.shard.operation import Operation, ShardRoute
from stepwell.pool.shard.shard import Shard
from stepwell.pool.slices.forgetting import Forget
from stepwell.pool.slices.policy import PauseChannel

CLIENTS = 5


@message
@dataclass(frozen=True, slots=True)
class Unreadable(Operation[None]):
    """As of a release that the shard does not know."""

    route = ShardRoute.FIRST

    def run(self, shard: Shard) -> None:
        raise AssertionError("it cannot be read")


class CountedTransport:
    """To the shards of a pool in this process. A message with an unreadable operation fails as a whole."""

    connections = 1

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.sizes: list[tuple[str, int]] = []
        """The shard of each message, and how many operations it had."""
        self.may_pass = asyncio.Event()
        self.may_pass.set()

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method == "run":
            self.sizes.append((actor, len(args[0])))
            await self.may_pass.wait()
            if any(isinstance(operation, Unreadable) for operation in args[0]):
                raise ActorFailed("no such class")
        return await self.pool.transport.call(actor, method, args, kwargs)


@pytest.fixture
def pool() -> LocalPool:
    return LocalPool(shards=2)


@pytest.fixture
def counted(pool: LocalPool) -> CountedTransport:
    return CountedTransport(pool)


@pytest.fixture
def clients(counted: CountedTransport) -> list[PoolClient]:
    shared = GatheringTransport(counted)
    return [PoolClient(counted.pool.plan.name, transport=shared) for _ in range(CLIENTS)]


def prompts_of(pool: LocalPool, shard: str, count: int) -> list[str]:
    names = (f"p{n}" for n in range(10_000))
    return [name for name, _ in zip((n for n in names if pool.plan.owners(n)[-1] == shard), range(count), strict=False)]


async def test_operations_of_several_clients_share_messages_and_each_gets_its_own_answer(
    pool: LocalPool, counted: CountedTransport, clients: list[PoolClient]
) -> None:
    prompts = [f"p{n}" for n in range(100)]
    await asyncio.gather(
        *(clients[n % CLIENTS].register_trajectory(Registration(p, p, f"c{n}")) for n, p in enumerate(prompts))
    )
    known = await asyncio.gather(*(clients[n % CLIENTS].channel_if_open(p, p) for n, p in enumerate(prompts)))
    assert known == [f"c{n}" for n in range(100)]
    assert sum(size for _, size in counted.sizes) == 200
    assert len(counted.sizes) <= 30


async def test_a_shard_that_is_slow_delays_no_other(
    pool: LocalPool, counted: CountedTransport, clients: list[PoolClient]
) -> None:
    first, second = pool.plan.shard_names()
    pool.transport.shards_stopped.add(second)
    (prompt,) = prompts_of(pool, second, 1)
    stuck = asyncio.create_task(clients[0].channel_if_open(prompt, prompt))
    async with asyncio.timeout(5):
        for prompt in prompts_of(pool, first, 20):
            assert await clients[1].channel_if_open(prompt, prompt) is None
    assert not stuck.done()
    pool.transport.shards_stopped.clear()
    assert await stuck is None


async def test_what_a_shard_cannot_read_fails_alone(
    pool: LocalPool, counted: CountedTransport, clients: list[PoolClient]
) -> None:
    await clients[0].pause_channel("before", paused=True)
    counted.may_pass.clear()
    first = asyncio.create_task(clients[0].pause_channel("train", paused=True))
    await until(lambda: len(counted.sizes) == 2, "the first message is under way")
    asked: list[Operation[Any]] = [PauseChannel("a", True), Unreadable(), PauseChannel("b", True)]
    others = [asyncio.create_task(client.ask(operation)) for client, operation in zip(clients[1:], asked, strict=False)]
    await asyncio.sleep(0)
    counted.may_pass.set()
    told = await asyncio.gather(first, *others, return_exceptions=True)
    assert (pool.plan.name, 3) in counted.sizes, "they shared a message"
    assert [isinstance(answer, ActorFailed) for answer in told] == [False, False, True, False]
    serving = await pool.newest_serving()
    assert [serving.channel(name).paused for name in ("train", "a", "b")] == [True] * 3


async def test_a_message_to_a_shard_that_is_away_fails_for_all_of_it_and_is_repeated_by_the_clients(
    pool: LocalPool, counted: CountedTransport, clients: list[PoolClient]
) -> None:
    shard = pool.plan.name
    prompts = prompts_of(pool, shard, CLIENTS)
    await asyncio.gather(*(client.channel_if_open("known", prompts[0]) for client in clients))
    counted.sizes.clear()
    pool.transport.shards_away.add(shard)
    asked = [asyncio.create_task(client.channel_if_open(p, p)) for client, p in zip(clients, prompts, strict=True)]
    await until(lambda: bool(counted.sizes), "the message fails")
    assert not any(task.done() for task in asked)
    pool.transport.shards_away.clear()
    assert await asyncio.gather(*asked) == [None] * CLIENTS


async def test_a_message_is_bounded_in_bytes(
    pool: LocalPool, counted: CountedTransport, clients: list[PoolClient]
) -> None:
    shard = pool.plan.name
    prompts = prompts_of(pool, shard, 2 * CLIENTS)
    tokens = LARGEST_MESSAGE // 4 // 3
    steps = [make_step(p, p, uid=p, prompt_ids=range(tokens)) for p in prompts]
    for prompt in prompts:
        await clients[0].register_trajectory(Registration(prompt, prompt))
    counted.sizes.clear()
    counted.may_pass.clear()
    sent = [asyncio.create_task(clients[n % CLIENTS].submit_steps([step])) for n, step in enumerate(steps)]
    await until(lambda: bool(counted.sizes), "the first message is under way")
    counted.may_pass.set()
    assert await asyncio.gather(*sent) == [[SubmitVerdict.ACCEPTED]] * len(steps)
    assert 1 < max(size for _, size in counted.sizes) <= 3


async def test_a_message_that_nobody_can_deliver_says_why(counted: CountedTransport) -> None:
    class Away(CountedTransport):
        async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            raise ActorAway("killed")

    with pytest.raises(ActorAway, match="killed"):
        await GatheringTransport(Away(counted.pool)).call("data_pool", "run", ([Unreadable()],), {})


async def test_a_message_without_an_answer_holds_up_the_next_ones_no_longer_than_its_timeout(
    pool: LocalPool, counted: CountedTransport
) -> None:
    shared = GatheringTransport(counted, timeout=0.05)
    counted.may_pass.clear()
    lost = asyncio.create_task(shared.call(pool.plan.name, "run", ([PauseChannel("lost", True)],), {}))
    await until(lambda: bool(counted.sizes), "the message that gets no answer")
    behind = asyncio.create_task(shared.call(pool.plan.name, "run", ([PauseChannel("behind", True)],), {}))
    with pytest.raises(ActorAway, match=r"no answer within 0\.05 s"):
        await lost
    counted.may_pass.set()
    (serving,) = await behind
    assert serving.channel("behind").paused


async def test_what_is_no_operation_is_refused_and_holds_up_nobody(
    pool: LocalPool, counted: CountedTransport, clients: list[PoolClient]
) -> None:
    shared = GatheringTransport(counted)
    for other in (pool.plan, Forget("ann")):  # a long operation has a call of its own
        with pytest.raises(BadRequest, match="a message to a shard is a list of operations"):
            await shared.call(pool.plan.name, "run", ([other],), {"revision": 1})
    assert await clients[0].channel_if_open("t", "p") is None
