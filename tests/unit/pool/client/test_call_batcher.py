"""Over shards that answer when the test says so; over real ones in tests/integration/pool."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from stepwell.errors import Conflict, PoolUnavailable
from stepwell.pool.client import call_batcher as module
from stepwell.pool.client.call_batcher import CallBatcher
from stepwell.pool.client.shards import ShardSet
from tests.rig.waiting import until

Asked = Sequence[tuple[str, tuple[Any, ...]]]


class SlowShards:
    """Echoes each question's argument; an exception is what it refuses with."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, list[Any]]] = []
        self.may_answer = asyncio.Event()
        self.failure: Exception | None = None

    async def ask(self, shard: str, method: str, questions: Asked) -> list[Any]:
        assert method == "answer"
        self.messages.append((shard, [args[0] for _, args in questions]))
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return [args[0] for _, args in questions]


@pytest.fixture
def shards() -> SlowShards:
    return SlowShards()


@pytest.fixture
def gathering(shards: SlowShards) -> CallBatcher:
    return CallBatcher(cast("ShardSet", shards))


async def test_what_is_asked_while_a_message_is_under_way_shares_the_next(
    shards: SlowShards, gathering: CallBatcher
) -> None:
    first = asyncio.create_task(gathering.ask("a", "echo", 1))
    await until(lambda: shards.messages == [("a", [1])], "the first message")
    others = [asyncio.create_task(gathering.ask("a", "echo", n)) for n in (2, 3, 4)]
    await asyncio.sleep(0)
    shards.may_answer.set()
    assert await asyncio.gather(first, *others) == [1, 2, 3, 4]
    assert shards.messages == [("a", [1]), ("a", [2, 3, 4])]


async def test_a_shard_does_not_wait_for_another(shards: SlowShards, gathering: CallBatcher) -> None:
    both = [asyncio.create_task(gathering.ask(shard, "echo", shard)) for shard in ("a", "b")]
    await until(lambda: shards.messages == [("a", ["a"]), ("b", ["b"])], "a message to each")
    shards.may_answer.set()
    assert await asyncio.gather(*both) == ["a", "b"]


async def test_one_that_is_refused_is_refused_alone(shards: SlowShards, gathering: CallBatcher) -> None:
    shards.may_answer.set()
    asked = [gathering.ask("a", "echo", said) for said in (1, Conflict("no"), 3)]
    one, refused, three = await asyncio.gather(*asked, return_exceptions=True)
    assert (one, three) == (1, 3)
    assert isinstance(refused, Conflict)
    assert len(shards.messages) == 1


async def test_all_of_a_message_hear_that_it_failed_and_the_next_goes_its_way(
    shards: SlowShards, gathering: CallBatcher
) -> None:
    shards.failure = PoolUnavailable("away")
    shards.may_answer.set()
    heard = await asyncio.gather(*(gathering.ask("a", "echo", n) for n in (1, 2)), return_exceptions=True)
    assert [str(failure) for failure in heard] == ["away", "away"]
    shards.failure = None
    assert await gathering.ask("a", "echo", 3) == 3


async def test_a_question_behind_a_message_that_hangs_is_given_up_in_time(
    shards: SlowShards, gathering: CallBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asyncio.create_task(gathering.ask("a", "echo", 1))
    await until(lambda: bool(shards.messages), "the first message")
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    with pytest.raises(PoolUnavailable, match="'a': no answer to echo within 0.05 s"):
        await gathering.ask("a", "echo", 2)
    shards.may_answer.set()
    assert await first == 1
    assert await gathering.ask("a", "echo", 3) == 3
    assert shards.messages == [("a", [1]), ("a", [3])]


async def test_a_caller_that_leaves_takes_its_question_along(shards: SlowShards, gathering: CallBatcher) -> None:
    first = asyncio.create_task(gathering.ask("a", "echo", 1))
    await until(lambda: bool(shards.messages), "the first message")
    leaving, staying = (asyncio.create_task(gathering.ask("a", "echo", n)) for n in (2, 3))
    await asyncio.sleep(0)
    leaving.cancel()
    shards.may_answer.set()
    assert [await first, await staying] == [1, 3]
    assert leaving.cancelled()
    assert shards.messages == [("a", [1]), ("a", [3])]
