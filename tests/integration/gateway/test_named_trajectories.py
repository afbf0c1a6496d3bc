"""Calls at the gateway's root whose header names a trajectory: one base_url for all rollouts of a harness."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.gateway.calls import session_id_by_name

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.issued_keys import CONTROL, bearer
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.access.caller import Role
from stepwell.access.key_file import KeyFile, create_key
from tests.integration.gateway.test_sessions import live_pool, trajectories

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
CHAT = "/v1/chat/completions"
PLACE = "x-stepwell-trajectory"


@asynccontextmanager
async def gateway(path: Path, pool: LocalPool, engine: FakeEngine, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_gateway(
            pool, [engine.url], control_keys=[CONTROL], issued=KeyFile(path / "keys.json", interval=0.0), **more
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


def new_key(path: Path, role: Role, *channels: str) -> str:
    return create_key(path / "keys.json", role, channels=channels)[0]


async def ask(client: httpx.AsyncClient, key: str, name: str, header: str = "X-Session-ID", **more: Any) -> str:
    """The trajectory that the call was recorded in; empty if it was not."""
    answer = await client.post(CHAT, json={**HELLO, **more}, headers={**bearer(key), header: name})
    assert answer.status_code == 200, answer.text
    return str(answer.headers.get(PLACE, ""))


async def steps_arrive(pool: LocalPool, counts: list[int]) -> None:
    await until(lambda: [len(found.steps) for found in trajectories(pool)] == counts, "the steps")


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_with_the_same_name_are_one_trajectory_which_its_name_finds(
    tmp_path: Path, engine: FakeEngine, stream: bool
) -> None:
    pool, key = live_pool(None), new_key(tmp_path, Role.RUNNER)
    async with gateway(tmp_path, pool, engine) as client:
        places = [await ask(client, key, name, stream=stream) for name in ("rollout-1", "rollout-2", "rollout-1")]
        assert places == [f"rollout-{n}/session@rollout-{n}" for n in (1, 2, 1)]
        await steps_arrive(pool, [2, 1])
        ended = await client.post(f"/{places[0]}/v1/complete_trajectory", json={"reward": 1.0}, headers=bearer(key))
        assert ended.json()["status"] == "completed"
    assert [found.completed for found in trajectories(pool)] == [True, False]


@pytest.mark.parametrize("header", ["x-session-id", "X-Claude-Code-Session-Id", "session-id", "session_id"])
async def test_each_harness_has_its_header(tmp_path: Path, engine: FakeEngine, header: str) -> None:
    async with gateway(tmp_path, live_pool(None), engine) as client:
        assert await ask(client, CONTROL, "one", header) == "one/session@one"


async def test_a_rollout_that_was_opened_in_a_group_is_named_by_both_its_uids(
    tmp_path: Path, engine: FakeEngine
) -> None:
    pool, key = live_pool(None), new_key(tmp_path, Role.RUNNER)
    async with gateway(tmp_path, pool, engine) as client:
        wanted = {"trajectory_uid": "t", "prompt_uid": "p", "group_size": 2}
        assert (await client.post("/init_trajectory", json=wanted, headers=bearer(key))).status_code == 200
        assert await ask(client, key, "t/p") == "t/p"
        await steps_arrive(pool, [1])
        lost = await client.post(CHAT, json=HELLO, headers={**bearer(key), "X-Session-ID": "t/other"})
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "unknown_trajectory")


async def test_a_named_call_with_capture_off_is_not_recorded(tmp_path: Path, engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with gateway(tmp_path, pool, engine) as client:
        off = {**bearer(CONTROL), "X-Session-ID": "one", "X-Stepwell-Capture": "off"}
        assert PLACE not in (await client.post(CHAT, json=HELLO, headers=off)).headers
    assert trajectories(pool) == []


async def test_the_name_means_nothing_below_unrecorded(tmp_path: Path, engine: FakeEngine) -> None:
    pool, key = live_pool(None), new_key(tmp_path, Role.ENVIRONMENT)
    async with gateway(tmp_path, pool, engine) as client:
        for by in (key, CONTROL):
            answer = await client.post(f"/unrecorded{CHAT}", json=HELLO, headers={**bearer(by), "X-Session-ID": "one"})
            assert answer.json()["choices"][0]["token_ids"]
            assert PLACE not in answer.headers
    assert trajectories(pool) == []


async def test_a_key_for_a_channel_names_trajectories_of_its_channel_only(tmp_path: Path, engine: FakeEngine) -> None:
    pool, key = live_pool(None), new_key(tmp_path, Role.RUNNER, "search")
    async with gateway(tmp_path, pool, engine) as client:
        assert await ask(client, key, "mine")
        assert await ask(client, CONTROL, "theirs")
        refused = await client.post(CHAT, json=HELLO, headers={**bearer(key), "X-Session-ID": "theirs"})
        assert refused.status_code == 403
        await steps_arrive(pool, [1, 1])
    assert [found.group.channel for found in trajectories(pool)] == ["search", "train"]


def test_a_name_that_cannot_stand_in_a_url_is_replaced_by_its_digest() -> None:
    assert session_id_by_name("a-1:b") == "a-1:b"
    for name in ("a b", "ä", "session", "v1", "unrecorded", "x" * 200, "a/b/c"):
        assert session_id_by_name(name) != name
        assert len(session_id_by_name(name)) == 32
