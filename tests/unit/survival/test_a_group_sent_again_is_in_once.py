"""D11: an environment that got no answer sends its group again, to another server or to a restarted one."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from stepwell.atropos.group_intake import PERIOD, GroupIntake
from stepwell.atropos.metrics import AtroposMetrics
from stepwell.atropos.registry import Registry
from stepwell.wire.scored_groups import group_from_json
from tests.rig.atropos.server import scored_group, serve_atropos
from tests.rig.local_pool import LocalPool

BY_KEY = {"Idempotency-Key": "first"}


@asynccontextmanager
async def new_server(pool: LocalPool) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


@pytest.mark.parametrize("headers", [{}, BY_KEY], ids=["by content", "by key"])
async def test_a_new_server_recognises_what_another_has_sent(headers: Mapping[str, str]) -> None:
    pool = LocalPool(shards=3)
    groups: list[dict[str, Any]] = [scored_group(first) for first in range(4)]
    async with new_server(pool) as client:
        answer = await client.post("/scored_data_list", json=groups, headers=headers)
        assert answer.json() == {"status": "received", "groups_processed": 4}
    async with new_server(pool) as client:
        answer = await client.post("/scored_data_list", json=groups, headers=headers)
        assert answer.json() == {"status": "received", "groups_processed": 4, "duplicates": 4}
    assert (await pool.ready_groups("train")).total_groups == 4
    assert len(await pool.fetch_batch(4)) == 4
    async with new_server(pool) as client:
        assert (await client.post("/scored_data_list", json=groups, headers=headers)).json()["duplicates"] == 4


def intake(pool: LocalPool, now: float) -> GroupIntake:
    return GroupIntake(pool, AtroposMetrics(lambda: iter(()), lambda: iter(())), lambda: now)


async def test_the_same_tokens_minutes_later_are_another_group() -> None:
    pool, group, began = LocalPool(shards=3), group_from_json(scored_group()), 1_000 * PERIOD

    async def sent_again(now: float) -> bool:
        (had,) = await intake(pool, now).submit("train", Registry(), [group], None, time.monotonic())
        return had

    assert not await sent_again(began)
    assert await sent_again(began + 2 * PERIOD)
    assert not await sent_again(began + 3 * PERIOD)
    assert await sent_again(began + 3 * PERIOD)
    assert (await pool.ready_groups("train")).total_groups == 2
