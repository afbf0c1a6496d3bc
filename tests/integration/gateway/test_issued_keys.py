"""Keys with roles and scopes at a real gateway, over real HTTP."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.issued_keys import CONTROL, bearer
from rig.local_pool import LocalPool
from stepwell.access.audit_log import AuditLog, verify
from stepwell.access.caller import Role
from stepwell.access.key_file import KeyFile, create_key, revoke_key
from tests.integration.gateway.test_sessions import live_pool, trajectories
from tests.integration.gateway.test_whitebox import STEP

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
OTHER_BODIES = {
    "completions": {"model": "tiny", "prompt": "hello", "max_tokens": 8},
    "responses": {"model": "tiny", "input": "hello"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@asynccontextmanager
async def gateway(path: Path, pool: LocalPool, engine: FakeEngine, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    issued = KeyFile(path, interval=0.0)
    async with (
        serve_gateway(pool, [engine.url], control_keys=[CONTROL], issued=issued, **more) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


async def opened(client: httpx.AsyncClient, key: str, **wanted: Any) -> tuple[str, str]:
    """The path and the key of a new trajectory."""
    answer = await client.post("/init_trajectory", json=wanted, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    made = answer.json()
    return f"/{made['trajectory_uid']}/{made['prompt_uid']}", made["api_key"]


async def status(client: httpx.AsyncClient, path: str, key: str, body: Any = None) -> int:
    return (await client.post(path, json=body or {}, headers=bearer(key))).status_code


async def test_the_key_of_a_trajectory_is_void_when_the_trajectory_has_ended(
    path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    async with gateway(path, pool, engine) as client:
        for how in ("complete", "abort"):
            place, own = await opened(client, CONTROL)
            assert await status(client, f"{place}/v1/chat/completions", own, HELLO) == 200
            assert await status(client, f"{place}/v1/{how}_trajectory", CONTROL) == 200
            asked = engine.request_count
            for call in ("chat/completions", "completions", "messages", "responses", "messages/count_tokens"):
                body = OTHER_BODIES.get(call, HELLO)
                answer = await client.post(f"{place}/v1/{call}", json=body, headers=bearer(own))
                assert answer.status_code == 404, (how, call, answer.text)
            assert engine.request_count == asked, "no engine is asked"


async def test_revoking_a_key_also_ends_the_calls_in_what_it_opened(
    path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    runner, issued = create_key(path, Role.RUNNER)
    async with gateway(path, pool, engine) as client:
        place, own = await opened(client, runner)
        assert await status(client, f"{place}/v1/chat/completions", own, HELLO) == 200
        revoke_key(path, issued.id)
        assert await status(client, f"{place}/v1/chat/completions", own, HELLO) == 401
        refused = await client.post("/init_trajectory", headers=bearer(runner))
        assert (refused.status_code, "was revoked" in refused.text) == (401, True)
        assert await status(client, f"{place}/v1/complete_trajectory", CONTROL) == 200


async def test_a_runner_of_one_channel_stays_in_it(path: Path, pool: LocalPool, engine: FakeEngine) -> None:
    math, _ = create_key(path, Role.RUNNER, channels=["math"])
    search, _ = create_key(path, Role.RUNNER, projects=["search"])
    async with gateway(path, pool, engine) as client:
        place, _ = await opened(client, math)
        trajectory_uid, prompt_uid = place.strip("/").split("/")
        assert pool.rules.channel_if_open(trajectory_uid, prompt_uid) == "math", "the only channel of its key"
        for channel in ("train", "judge", "search.train"):
            assert await status(client, "/init_trajectory", math, {"channel": channel}) == 403
        assert await status(client, "/init_trajectory", search) == 403, "the channel train"
        await opened(client, search, channel="search.train")
        for call in ("register", "complete", "abort"):
            assert await status(client, f"{place}/v1/{call}_trajectory", search) == 403
        assert await status(client, f"{place}/v1/register_trajectory", math, {"channel": "train"}) == 403
        assert await status(client, f"{place}/v1/complete_trajectory", math, {"channel": "train"}) == 403
        for channel, answer in (("math", 200), ("train", 403)):
            found = await client.get("/pacing", params={"channel": channel}, headers=bearer(math))
            assert found.status_code == answer
        assert pool.rules.channel_if_open(trajectory_uid, prompt_uid) == "math"
        assert await status(client, f"{place}/v1/complete_trajectory", math, {"reward": 1.0}) == 200


async def test_a_runner_of_one_channel_submits_no_steps_elsewhere(
    path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    math, _ = create_key(path, Role.RUNNER, channels=["math"])
    async with gateway(path, pool, engine) as client:
        await opened(client, CONTROL, trajectory_uid="t", prompt_uid="p", channel="train")
        for query, uids, answer in (
            ("?channel=math", ("u", "q"), 200),
            ("?channel=math", ("t", "p"), 403),
            ("?channel=train", ("u", "q"), 403),
            ("", ("u", "q"), 403),
        ):
            body = {"steps": [{**STEP, "trajectory_uid": uids[0], "prompt_uid": uids[1]}]}
            assert await status(client, f"/submit_steps{query}", math, body) == answer, (query, uids)


async def test_a_reward_is_given_by_a_reward_key_in_its_channel_also_after_the_end(
    path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    math, _ = create_key(path, Role.REWARD, channels=["math"])
    other, _ = create_key(path, Role.REWARD, channels=["judge"])
    runner, _ = create_key(path, Role.RUNNER)
    async with gateway(path, pool, engine) as client:
        place, own = await opened(client, runner, channel="math")
        assert await status(client, f"{place}/v1/chat/completions", own, HELLO) == 200
        assert await status(client, f"{place}/v1/complete_trajectory", runner) == 200
        for key, answer in ((other, 403), (runner, 403), (own, 403), (math, 200)):
            assert await status(client, f"{place}/v1/feedback", key, {"value": 1.0}) == answer


async def test_a_session_key_of_the_file_opens_sessions_of_its_name_in_its_channel(
    path: Path, engine: FakeEngine
) -> None:
    ann, issued = create_key(path, Role.SESSION, name="ann", channels=["support"])
    pool = live_pool(None)
    async with gateway(path, pool, engine) as client:
        assert await status(client, "/session/v1/chat/completions", ann, HELLO) == 200
        place, own = await opened(client, ann)
        assert await status(client, f"{place}/v1/chat/completions", own, HELLO) == 200
        assert {(it.group.channel, it.metadata["session"]["user"]) for it in trajectories(pool)} == {("support", "ann")}
        revoke_key(path, issued.id)
        assert await status(client, "/session/v1/chat/completions", ann, HELLO) == 401
        assert await status(client, f"{place}/v1/chat/completions", own, HELLO) == 401


async def test_control_calls_are_recorded_with_the_key_and_agents_calls_are_not(
    path: Path, pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    runner, issued = create_key(path, Role.RUNNER, name="rollouts")
    file = tmp_path / "audit.jsonl"
    audit = AuditLog(file)
    async with gateway(path, pool, engine, audit=audit) as client:
        place, own = await opened(client, runner)
        assert await status(client, f"{place}/v1/chat/completions", own, HELLO) == 200
        await client.get("/engines", headers=bearer(CONTROL))
        assert await status(client, "/forget", runner, {"subject": "ann"}) == 403
        assert await status(client, "/forget", "unknown", {"subject": "ann"}) == 401
        assert await status(client, f"{place}/v1/feedback", own, {"value": 1.0}) == 403
        assert await status(client, f"{place}/v1/complete_trajectory", runner) == 200
    audit.close()
    lines = file.read_bytes().splitlines(keepends=True)
    assert verify(lines).fault == ""
    found = [(it["key"], it["role"], it["call"], it["status"]) for it in map(json.loads, lines)]
    agent = f"of trajectory {place.split('/')[1]}"
    assert found == [
        (issued.id, "runner", "POST /init_trajectory", 200),
        (issued.id, "runner", "POST /forget", 403),
        (agent, "trajectory", f"POST {place}/v1/feedback", 403),
        (issued.id, "runner", f"POST {place}/v1/complete_trajectory", 200),
    ]
    assert "ann" not in file.read_text(), "bodies are not recorded"
