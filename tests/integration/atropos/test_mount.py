"""The Atropos server beside the gateway, in one process."""

from contextlib import AbstractAsyncContextManager

import httpx
import pytest

from rig.atropos.server import TRAINER, firsts, scored_group
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.access.access_keys import AccessKeys
from stepwell.atropos.app import create_atropos

KEY = "control-key-of-the-tests"


def gateway_with_atropos(pool: LocalPool, engine: FakeEngine, keys: list[str]) -> AbstractAsyncContextManager[str]:
    server = create_atropos(pool=pool, keys=AccessKeys(keys), state=None)
    return serve_gateway(pool, [engine.url], control_keys=keys, atropos=server)


async def test_the_gateway_serves_the_atropos_server_below_atropos(pool: LocalPool) -> None:
    async with (
        FakeEngine() as engine,
        gateway_with_atropos(pool, engine, []) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        assert (await client.get("/atropos")).json()["message"] == "Stepwell Atropos server"
        await client.post("/atropos/register", json={**TRAINER, "batch_size": 3})
        base_url = (await client.post("/init_trajectory", json={})).json()["base_url"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        assert (await client.post(f"{base_url}/v1/chat/completions", json=body)).status_code == 200
        await client.post(f"{base_url}/v1/complete_trajectory", json={"reward": 0.5})
        await client.post("/atropos/scored_data", json=scored_group(7))
        agent, environment = (await client.get("/atropos/batch")).json()["batch"]
        assert agent["scores"] == [0.5]
        assert firsts([environment]) == [7]
        assert (await client.get("/atropos/channel/judge/status")).json() == {"current_step": 0, "queue_size": 0}
        assert (await client.get("/atroposphere")).status_code == 404


@pytest.mark.parametrize("path", ["/atropos", "/atropos/batch", "/atropos/t/p/v1/models"])
async def test_the_gateways_control_keys_are_the_atropos_servers(pool: LocalPool, path: str) -> None:
    async with (
        FakeEngine() as engine,
        gateway_with_atropos(pool, engine, [KEY]) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        assert (await client.get(path)).status_code == 401
        assert (await client.get("/atropos/health")).status_code == 200
        assert (await client.get("/atropos/info", auth=("", KEY))).status_code == 200


async def test_without_the_flag_there_is_no_atropos(pool: LocalPool) -> None:
    async with (
        FakeEngine() as engine,
        serve_gateway(pool, [engine.url]) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        assert (await client.get("/atropos/info")).status_code == 404
