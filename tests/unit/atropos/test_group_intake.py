"""Groups on their way to the pool: messages shared by several requests, and the names of groups."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.atropos.group_intake import (
    MAX_MESSAGE_TOKENS,
    PIECE,
    SEQUENCE_WEIGHT,
    GroupIntake,
    GroupReader,
    GroupSender,
    NamedGroup,
    name_by_key,
)
from stepwell.atropos.http import AtroposRequest
from stepwell.atropos.registry import AtroposMetrics, Registry
from stepwell.errors import BadRequest, PoolFull, PoolUnavailable
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.steps.columns import Columns
from stepwell.wire.scored_groups import EnvRegistration, ScoredGroup, group_from_json
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_to_arrow


class SlowPool(LocalPool):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.go_on = asyncio.Event()

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        self.asked += 1
        await self.go_on.wait()
        return await super().submit_columns(columns, registrations)


def named_group(name: str, size: int) -> list[NamedGroup]:
    group = group_from_json({"tokens": [[1, 2]] * size, "masks": [[-100, 2]] * size, "scores": [0] * size})
    return [NamedGroup(group, name, "train", "")]


async def test_what_comes_while_a_message_is_under_way_goes_with_the_next() -> None:
    pool = SlowPool()
    sender = GroupSender(pool)
    first = asyncio.create_task(sender.submit(named_group("a", 1)))
    await until(lambda: pool.asked == 1, "the first message")
    others = [asyncio.create_task(sender.submit(named_group(name, size))) for name, size in (("b", 2), ("c", 3))]
    again = asyncio.create_task(sender.submit(named_group("a", 1)))
    pool.go_on.set()
    assert await first == [SubmitVerdict.ACCEPTED]
    assert [await other for other in others] == [[SubmitVerdict.ACCEPTED] * 2, [SubmitVerdict.ACCEPTED] * 3]
    assert await again == [SubmitVerdict.DUPLICATE]
    assert pool.transport.messages == [1, 6]


async def test_a_message_waits_for_a_group_that_is_being_read() -> None:
    pool = LocalPool()
    sender = GroupSender(pool)
    with sender.reading():
        early = asyncio.create_task(sender.submit(named_group("a", 1)))
        await asyncio.sleep(0)
    assert await sender.submit(named_group("b", 2)) == [SubmitVerdict.ACCEPTED] * 2
    assert await early == [SubmitVerdict.ACCEPTED]
    assert pool.transport.messages == [3]


async def test_a_message_does_not_wait_for_one_that_is_read_for_ever() -> None:
    pool = LocalPool()
    sender = GroupSender(pool)
    with sender.reading():
        assert await sender.submit(named_group("a", 1)) == [SubmitVerdict.ACCEPTED]


async def test_a_failure_is_told_to_all_of_its_message_and_to_no_one_else() -> None:
    pool = SlowPool()
    sender = GroupSender(pool)
    waiting = [asyncio.create_task(sender.submit(named_group(name, 1))) for name in "ab"]
    pool.transport.loses_answers = 1
    pool.go_on.set()
    for task in waiting:
        with pytest.raises(PoolUnavailable):
            await task
    assert await sender.submit(named_group("c", 1)) == [SubmitVerdict.ACCEPTED]


async def test_one_that_no_longer_waits_takes_nothing_from_the_others() -> None:
    pool = SlowPool()
    sender = GroupSender(pool)
    leaves, stays = (asyncio.create_task(sender.submit(named_group(name, 1))) for name in "ab")
    await asyncio.sleep(0)
    leaves.cancel()
    pool.go_on.set()
    assert await stays == [SubmitVerdict.ACCEPTED]
    assert (await pool.ready_groups("train")).total_groups == 2


def groups_of(size: int, count: int) -> list[ScoredGroup]:
    one = {"masks": [[-100, 2]] * size, "scores": [0] * size}
    return [group_from_json({**one, "tokens": [[n, 2]] * size}) for n in range(1, count + 1)]


def intake(pool: LocalPool) -> GroupIntake:
    return GroupIntake(pool, no_metrics())


def no_metrics() -> AtroposMetrics:
    return AtroposMetrics(list, list)


async def test_a_long_list_reaches_the_pool_in_pieces_that_do_not_hold_it_up() -> None:
    pool = LocalPool()
    repeated = await intake(pool).submit("train", Registry(), groups_of(3, 1000), None, 0.0)
    assert repeated == [False] * 1000
    assert sum(pool.transport.messages) == 3000
    assert max(pool.transport.messages) <= PIECE
    assert (await pool.ready_groups("train")).total_groups == 1000, "no group is cut"


async def test_a_list_that_breaks_off_is_completed_when_it_is_sent_again() -> None:
    pool, groups = LocalPool(), groups_of(3, 1000)
    pool.transport.loses_answers = 1
    with pytest.raises(PoolUnavailable):
        await intake(pool).submit("train", Registry(), groups, "key", 0.0)
    taken = (await pool.ready_groups("train")).total_groups
    assert 0 < taken < 1000
    assert sum(await intake(pool).submit("train", Registry(), groups, "key", 0.0)) == taken
    assert (await pool.ready_groups("train")).total_groups == 1000


async def test_all_groups_of_a_list_that_finds_no_room_are_counted() -> None:
    pool, metrics = LocalPool(max_queue_size=400, overflow=Overflow.REFUSE), no_metrics()
    with pytest.raises(PoolFull, match="'train' is full"):
        await GroupIntake(pool, metrics).submit("train", Registry(), groups_of(3, 1000), None, 0.0)
    counted = metrics.exposition()[0].decode()
    assert 'stepwell_door_groups_total{result="received"} 400.0' in counted
    assert 'stepwell_door_groups_total{result="refused"} 600.0' in counted


async def test_several_lists_share_a_message_only_if_it_stays_small() -> None:
    pool = SlowPool()
    sender = GroupSender(pool)
    first = asyncio.create_task(sender.submit(named_group("a", 1)))
    await until(lambda: pool.asked == 1, "the first message")
    others = [asyncio.create_task(sender.submit(named_group(f"{n}", PIECE))) for n in range(5)]
    pool.go_on.set()
    await asyncio.gather(first, *others)
    assert max(pool.transport.messages) <= MAX_MESSAGE_TOKENS / SEQUENCE_WEIGHT


def group(**changes: Any) -> ScoredGroup:
    sent = {"tokens": [[1, 2], [3, 4]], "masks": [[1, 2], [-100, 4]], "scores": [0, 1], "images": {"a": 1, "b": 2}}
    return group_from_json({**sent, **changes})


def test_a_key_names_the_same_group_for_ever_in_every_server() -> None:
    name = name_by_key("train", "key", 0)
    assert name == name_by_key("train", "key", 0)
    others = {name_by_key(*other) for other in (("judge", "key", 0), ("train", "yek", 0), ("train", "key", 1))}
    assert len(others | {name}) == 4


def arrow_request(body: bytes) -> AtroposRequest:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": body}

    headers = [(b"content-type", MEDIA_TYPE.encode())]
    scope = {"type": "http", "method": "POST", "query_string": b"", "headers": headers}
    return AtroposRequest(scope, receive, max_body=2**20)


async def test_arrow_bodies_that_come_together_are_read_in_one_pass_and_each_has_its_own_fault() -> None:
    reader = GroupReader()
    one, other, faulty = groups_to_arrow([group()]), groups_to_arrow([group(tokens=[[5, 6], [7, 8]])]), b"hello"
    reads = [reader.read(arrow_request(body), "group") for body in (one, other)]
    (first,), (second,) = await asyncio.gather(*reads)
    assert [first.tokens.tolist(), second.tokens.tolist()] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert first.tokens.base is second.tokens.base
    reads = [reader.read(arrow_request(body), "group") for body in (one, faulty)]
    sound, failed = await asyncio.gather(*reads, return_exceptions=True)
    assert isinstance(sound, list)
    assert isinstance(failed, BadRequest)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, [0.7, 0.7]),
        ({"temperatures": [None, 1.2]}, [0.7, 1.2]),
        ({"generation_params": {"temperature": 0.3}}, [0.3, 0.3]),
    ],
)
async def test_a_sequence_has_the_temperature_that_it_tells_else_its_group_else_its_environment(
    told: dict[str, Any], found: list[float]
) -> None:
    pool, registry = LocalPool(), Registry()
    wanted = EnvRegistration(max_token_length=9, desired_name="e", weight=1.0, group_size=2, temperature=0.7)
    registry.register_env(wanted, now=0.0)
    sent = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0, 1], "env_id": 0, **told}
    await GroupIntake(pool, AtroposMetrics(list, list)).submit("train", registry, [group_from_json(sent)], None, 0.0)
    assert sorted(step.temperature or 0.0 for step in pool.taken("train")) == sorted(found)
