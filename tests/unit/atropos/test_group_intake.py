"""Groups on their way to the pool: messages shared by several requests, and the names of groups."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from stepwell.atropos.group_intake import PERIOD, GroupSender, content_digest, name_by_content, name_by_key
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.steps.columns import Columns
from stepwell.wire.scored_groups import ScoredGroup, group_from_json
from stepwell.wire.scored_groups_steps import columns_from_group
from tests.rig.local_pool import LocalPool
from tests.rig.waiting import until


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


def packed_group(name: str, size: int) -> tuple[Columns, list[Registration]]:
    group = group_from_json({"tokens": [[1, 2]] * size, "masks": [[-100, 2]] * size, "scores": [0] * size})
    columns = columns_from_group(group, name, source="", policy_version=0, arrived_at=0.0)
    return columns, [Registration(uid, name, "train", size) for uid in columns.trajectory_uids]


async def test_what_comes_while_a_message_is_under_way_goes_with_the_next() -> None:
    pool = SlowPool()
    sender = GroupSender(pool)
    first = asyncio.create_task(sender.submit(*packed_group("a", 1)))
    await until(lambda: pool.asked == 1, "the first message")
    others = [asyncio.create_task(sender.submit(*packed_group(name, size))) for name, size in (("b", 2), ("c", 3))]
    again = asyncio.create_task(sender.submit(*packed_group("a", 1)))
    pool.go_on.set()
    assert await first == [SubmitVerdict.ACCEPTED]
    assert [await other for other in others] == [[SubmitVerdict.ACCEPTED] * 2, [SubmitVerdict.ACCEPTED] * 3]
    assert await again == [SubmitVerdict.DUPLICATE]
    assert pool.transport.messages == [1, 6]


async def test_a_message_waits_for_a_group_that_is_being_read() -> None:
    pool = LocalPool()
    sender = GroupSender(pool)
    with sender.reading():
        early = asyncio.create_task(sender.submit(*packed_group("a", 1)))
        await asyncio.sleep(0)
    assert await sender.submit(*packed_group("b", 2)) == [SubmitVerdict.ACCEPTED] * 2
    assert await early == [SubmitVerdict.ACCEPTED]
    assert pool.transport.messages == [3]


async def test_a_message_does_not_wait_for_one_that_is_read_for_ever() -> None:
    pool = LocalPool()
    sender = GroupSender(pool)
    with sender.reading():
        assert await sender.submit(*packed_group("a", 1)) == [SubmitVerdict.ACCEPTED]


async def test_a_failure_is_told_to_all_of_its_message_and_to_no_one_else() -> None:
    pool = SlowPool()
    sender = GroupSender(pool)
    waiting = [asyncio.create_task(sender.submit(*packed_group(name, 1))) for name in "ab"]
    pool.transport.loses_answers = 1
    pool.go_on.set()
    for task in waiting:
        with pytest.raises(PoolUnavailable):
            await task
    assert await sender.submit(*packed_group("c", 1)) == [SubmitVerdict.ACCEPTED]


async def test_one_that_no_longer_waits_takes_nothing_from_the_others() -> None:
    pool = SlowPool()
    sender = GroupSender(pool)
    leaves, stays = (asyncio.create_task(sender.submit(*packed_group(name, 1))) for name in "ab")
    await asyncio.sleep(0)
    leaves.cancel()
    pool.go_on.set()
    assert await stays == [SubmitVerdict.ACCEPTED]
    assert (await pool.ready_groups("train")).total_groups == 2


def group(**changes: Any) -> ScoredGroup:
    sent = {"tokens": [[1, 2], [3, 4]], "masks": [[1, 2], [-100, 4]], "scores": [0, 1], "images": {"a": 1, "b": 2}}
    return group_from_json({**sent, **changes})


def test_a_key_names_the_same_rollouts_for_ever_in_every_server() -> None:
    name = name_by_key("train", "key", 0)
    assert name == name_by_key("train", "key", 0)
    assert name.rollouts(2) == {f"{name.prompt_uid}-0": (), f"{name.prompt_uid}-1": ()}
    others = {name_by_key(*other) for other in (("judge", "key", 0), ("train", "yek", 0), ("train", "key", 1))}
    assert len(others | {name}) == 4


@pytest.mark.parametrize(
    ("later", "is_same"), [(0.0, True), (PERIOD, True), (2 * PERIOD, True), (-1.0, True), (3 * PERIOD, False)]
)
def test_the_same_content_names_the_same_rollouts_for_a_while(later: float, is_same: bool) -> None:
    began = 1_000 * PERIOD
    (first,) = name_by_content("train", group(), 0.0, began).rollouts(1)
    ((again, others),) = name_by_content("train", group(), 0.0, began + later).rollouts(1).items()
    assert (first in (again, *others)) is is_same


def test_what_was_sent_before_a_reset_is_another_group() -> None:
    names = {name_by_content("train", group(), reset_at, PERIOD).prompt_uid for reset_at in (0.0, 1.0)}
    assert len(names) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [[1, 2], [3, 5]]},
        {"tokens": [[1, 2, 3], [4]], "masks": [[1, 2, -100], [4]]},
        {"masks": [[1, 2], [3, 4]]},
        {"scores": [0, 1.5]},
        {"inference_logprobs": [[0, 0], [0, 0]]},
        {"policy_versions": [1, 2]},
        {"env_id": 1},
        {"images": {"a": 1, "b": 3}},
        {"overrides": [{}, {"x": 1}]},
    ],
)
def test_a_difference_in_anything_is_a_difference_in_name(change: dict[str, Any]) -> None:
    assert content_digest("train", group(**change)) != content_digest("train", group())


def test_the_order_of_keys_is_no_difference() -> None:
    assert content_digest("train", group(images={"b": 2, "a": 1})) == content_digest("train", group())
