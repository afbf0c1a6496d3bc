"""D11: an environment that got no answer sends its group again, to another server or to a restarted one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rig.atropos.server import scored_group, serve_atropos
from rig.local_pool import LocalPool

BY_KEY = {"Idempotency-Key": "first"}


@asynccontextmanager
async def new_server(pool: LocalPool) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def test_a_new_server_recognises_what_another_has_sent() -> None:
    pool = LocalPool(shards=3)
    groups: list[dict[str, Any]] = [scored_group(first) for first in range(4)]
    async with new_server(pool) as client:
        answer = await client.post("/scored_data_list", json=groups, headers=BY_KEY)
        assert answer.json() == {"status": "received", "groups_processed": 4}
    async with new_server(pool) as client:
        answer = await client.post("/scored_data_list", json=groups, headers=BY_KEY)
        assert answer.json() == {"status": "received", "groups_processed": 4, "duplicates": 4}
    assert (await pool.ready_groups("train")).total_groups == 4
    assert len(await pool.fetch_batch(4)) == 4
    async with new_server(pool) as client:
        assert (await client.post("/scored_data_list", json=groups, headers=BY_KEY)).json()["duplicates"] == 4
