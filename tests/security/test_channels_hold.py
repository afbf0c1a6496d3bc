"""A key for one channel reaches no trajectory and no session of another one, whatever request names it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.issued_keys import CONTROL, bearer
from rig.local_pool import LocalPool
from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Role, SessionKey
from stepwell.access.key_file import KeyFile, create_key
from stepwell.gateway.agent_calls import TRAJECTORY_HEADER
from stepwell.steps.columns import unpack

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
ROLLOUT, SESSION = ("task-0", "task"), ("chat-ann", "session@chat-ann")
OPEN_ROLLOUT: dict[str, Any] = {"trajectory_uid": ROLLOUT[0], "prompt_uid": ROLLOUT[1]}
OPEN_SESSION: dict[str, Any] = {"session": True, "trajectory_uid": SESSION[0]}
OPENINGS = {ROLLOUT: OPEN_ROLLOUT, SESSION: OPEN_SESSION}
STEP = {"step_index": 9, "prompt_ids": [1], "response_ids": [2], "response_logprobs": [-0.5]}


@dataclass
class Gateway:
    http: httpx.AsyncClient
    runners: dict[str, str]
    """By channel: the key of a runner of this channel."""
    rewards: dict[str, str]
    sessions: dict[str, str]
    """Of one user: a session key in the file for this channel."""

    async def post(self, path: str, body: dict[str, Any], key: str, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers={**bearer(key), **headers})

    async def open(self, channel: str, ref: tuple[str, str]) -> str:
        """By the runner of this channel. Returns the key of the trajectory."""
        answer = await self.post("/init_trajectory", OPENINGS[ref], self.runners[channel])
        assert answer.status_code == 200, answer.text
        return str(answer.json()["api_key"])


@asynccontextmanager
async def gateway_of(pool: LocalPool, engine: FakeEngine, folder: Path) -> AsyncIterator[Gateway]:
    path = folder / "keys.json"
    keys = [
        {channel: create_key(path, role, name="ann", channels=[channel])[0] for channel in ("math", "other")}
        for role in (Role.RUNNER, Role.REWARD, Role.SESSION)
    ]
    issued = KeyFile(path, interval=0.0)
    async with (
        serve_gateway(pool, [engine.url], control_keys=[CONTROL], issued=issued) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        yield Gateway(http, *keys)


def calls(engine: FakeEngine) -> int:
    return sum(seen.path.endswith("chat/completions") for seen in engine.requests)


def requests_about(ref: tuple[str, str]) -> dict[str, tuple[str, dict[str, Any], dict[str, str]]]:
    """Everything that a runner can ask about a trajectory: path, body, headers."""
    root, name = "/{}/{}/v1".format(*ref), "{}/{}".format(*ref)
    step = {**STEP, "trajectory_uid": ref[0], "prompt_uid": ref[1]}
    unrecorded = {"x-session-id": name, "x-stepwell-capture": "off"}
    asked: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
        "open": ("/init_trajectory", OPENINGS[ref], {}),
        "open in its channel": ("/init_trajectory", {**OPENINGS[ref], "channel": "other"}, {}),
        "open in the own one": ("/init_trajectory", {**OPENINGS[ref], "channel": "math"}, {}),
        "register": (f"{root}/register_trajectory", {"channel": "math"}, {}),
        "describe": (f"{root}/register_trajectory", {"metadata": {"a": 1}}, {}),
        "complete": (f"{root}/complete_trajectory", {"reward": 1.0}, {}),
        "move and complete": (f"{root}/complete_trajectory", {"reward": 1.0, "channel": "math"}, {}),
        "abort": (f"{root}/abort_trajectory", {}, {}),
        "submit": ("/submit_steps?channel=math", {"steps": [step]}, {}),
        "call": ("/v1/chat/completions", CHAT, {"x-session-id": name}),
        "call unrecorded": ("/v1/chat/completions", CHAT, unrecorded),
        "call in a session of v1": ("/session/v1/chat/completions", CHAT, {"x-session-id": name}),
    }
    if ref == SESSION:
        asked["open without capture"] = ("/init_trajectory", {**OPEN_SESSION, "capture": False}, {})
        asked["call by name"] = ("/v1/chat/completions", CHAT, {"x-session-id": ref[0]})
        asked["call by name unrecorded"] = ("/v1/chat/completions", CHAT, {**unrecorded, "x-session-id": ref[0]})
    return asked


@pytest.mark.parametrize("has_step", [False, True], ids=["new", "with a step"])
@pytest.mark.parametrize("ref", OPENINGS, ids=str)
async def test_a_runner_of_another_channel_is_refused_and_changes_nothing(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path, ref: tuple[str, str], *, has_step: bool
) -> None:
    root = "/{}/{}/v1".format(*ref)
    async with gateway_of(pool, engine, tmp_path) as gateway:
        own = await gateway.open("other", ref)
        if has_step:
            assert (await gateway.post(f"{root}/chat/completions", CHAT, own)).status_code == 200
        called, let_in = calls(engine), dict[str, str]()
        for what, (path, body, headers) in requests_about(ref).items():
            answer = await gateway.post(path, body, gateway.runners["math"], **headers)
            if answer.status_code != 403 or "is for channel math" not in answer.text or "api_key" in answer.text:
                let_in[what] = f"{answer.status_code} {answer.text}"
        assert let_in == {}
        assert calls(engine) == called
        assert await pool.channel_of(*ref) == "other"
        assert (await gateway.post(f"{root}/chat/completions", CHAT, own)).status_code == 200
        ended = await gateway.post(f"{root}/complete_trajectory", {"reward": 1.0}, gateway.runners["other"])
        assert ended.json() == {"status": "completed"}
    steps = unpack(await pool.read([ref]), copy=True)
    assert len(steps) == 1 + has_step
    assert "a" not in steps[-1].metadata


@pytest.mark.parametrize("ref", OPENINGS, ids=str)
async def test_feedback_from_another_channel_is_refused(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path, ref: tuple[str, str]
) -> None:
    feedback = "/{}/{}/v1/feedback".format(*ref)
    async with gateway_of(pool, engine, tmp_path) as gateway:
        await gateway.open("other", ref)
        assert (await gateway.post(feedback, {"value": 1.0}, gateway.rewards["math"])).status_code == 403
        assert (await gateway.post(feedback, {"value": 1.0}, gateway.rewards["other"])).status_code == 200


async def test_an_ended_session_of_another_channel_does_not_go_on(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    async with gateway_of(pool, engine, tmp_path) as gateway:
        own = await gateway.open("other", SESSION)
        root = "/{}/{}/v1".format(*SESSION)
        await gateway.post(f"{root}/chat/completions", CHAT, own)
        await gateway.post(f"{root}/complete_trajectory", {"reward": 1.0}, gateway.runners["other"])
        for what in ("open", "call", "call by name", "call unrecorded"):
            path, body, headers = requests_about(SESSION)[what]
            assert (await gateway.post(path, body, gateway.runners["math"], **headers)).status_code == 403, what
        assert (await pool.stats()).sessions.open == 0


async def test_the_runner_of_a_channel_opens_its_own_names_again(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    async with gateway_of(pool, engine, tmp_path) as gateway:
        for ref in OPENINGS:
            assert await gateway.open("math", ref) == await gateway.open("math", ref)
            for what in ("call", "call unrecorded"):
                path, body, headers = requests_about(ref)[what]
                answer = await gateway.post(path, body, gateway.runners["math"], **headers)
                assert answer.status_code == 200, (ref, what, answer.text)


async def test_a_users_keys_of_two_channels_do_not_meet_in_one_session(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    async with gateway_of(pool, engine, tmp_path) as gateway:
        plain = AccessKeys([CONTROL]).session_key(SessionKey("ann"))
        opened = await gateway.post("/v1/chat/completions", CHAT, plain, **{"x-session-id": "my chat"})
        uid, prompt_uid = opened.headers[TRAJECTORY_HEADER.decode()].split("/")
        assert await pool.channel_of(uid, prompt_uid) == "train"
        refused = await gateway.post(
            "/v1/chat/completions", CHAT, gateway.sessions["math"], **{"x-session-id": "my chat"}
        )
        assert refused.status_code == 403
