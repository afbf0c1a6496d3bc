"""Open as Atropos is, or closed to all who have no control key."""

import httpx
import pytest

from rig.atropos.server import TRAINER, scored_group, serve_atropos
from rig.local_pool import LocalPool

KEY = "control-key-of-the-tests"
CALLS = (
    ("GET", "/"),
    ("GET", "/batch"),
    ("GET", "/reset_data"),
    ("GET", "/metrics"),
    ("GET", "/channel/judge/status"),
    ("POST", "/register"),
    ("POST", "/scored_data"),
    ("GET", "/no/such/path"),
)


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_with_keys_nothing_is_answered_without_one(pool: LocalPool, method: str, path: str) -> None:
    async with serve_atropos(pool, control_keys=[KEY]) as url, httpx.AsyncClient(base_url=url) as client:
        for headers in ({}, {"authorization": "Bearer no-such-key-at-all"}, {"authorization": "Basic Og=="}):
            answer = await client.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert answer.status_code == 401
            assert "Authorization: Bearer KEY" in answer.json()["detail"]


async def test_the_probes_stay_open(pool: LocalPool) -> None:
    async with serve_atropos(pool, control_keys=[KEY]) as url, httpx.AsyncClient(base_url=url) as client:
        assert {(await client.get(path)).status_code for path in ("/health", "/ready")} == {200}


@pytest.mark.parametrize("style", ["bearer", "url"])
async def test_a_client_sends_the_key_as_a_header_or_has_it_in_its_url(pool: LocalPool, style: str) -> None:
    async with serve_atropos(pool, control_keys=[KEY]) as url:
        base = url.replace("http://", f"http://:{KEY}@") if style == "url" else url
        headers = {"authorization": f"Bearer {KEY}"} if style == "bearer" else {}
        async with httpx.AsyncClient(base_url=base, headers=headers) as client:
            assert "uuid" in (await client.post("/register", json=TRAINER)).json()
            assert (await client.post("/scored_data", json=scored_group())).json() == {"status": "received"}
            assert (await client.get("/reset_data")).status_code == 200
