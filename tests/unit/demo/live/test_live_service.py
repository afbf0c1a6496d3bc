import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
from aiohttp import web
from openai import AsyncOpenAI
from stepwell.demo.live_outcome import UserTurn, write_turn
from stepwell.demo.live_service import CLOSINGS, LiveService

from stepwell.demo.agent_process import Orders

KEY = "a session key"
ORDERS = Orders(
    task="live",
    seed=0,
    engine="",
    tokenizer="",
    data_pool_name="",
    ray_address="",
    ray_namespace="",
    turns="",
    concurrency=4,
)


@dataclass
class ScriptedGateway:
    """It answers with the last word reversed."""

    url: str = ""
    fails: bool = False
    sessions: dict[str, list[list[dict[str, str]]]] = field(default_factory=dict)
    """The messages of each call."""
    thumbs: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["session"] is True
        uid = asked["trajectory_uid"]
        return web.json_response({"base_url": f"{self.url}/{uid}/v1", "api_key": KEY})

    async def chat(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["authorization"])
        messages = (await request.json())["messages"]
        self.sessions.setdefault(request.match_info["uid"], []).append(messages)
        if len(self.sessions) >= 60:
            self.enough.set()
        if self.fails:
            return web.json_response({"error": {"message": "no", "code": "engine_unavailable"}}, status=503)
        said = messages[-1]["content"]
        reply = "ok" if said in CLOSINGS else said.split()[-1][::-1]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        return web.json_response(
            {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
        )

    async def feedback(self, request: web.Request) -> web.Response:
        self.thumbs.append((request.match_info["uid"], await request.json()))
        return web.json_response({"status": "counted"})


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    scripted = ScriptedGateway()
    app = web.Application()
    app.router.add_post("/init_trajectory", scripted.open)
    app.router.add_post("/{uid}/v1/chat/completions", scripted.chat)
    app.router.add_post("/{uid}/v1/feedback", scripted.feedback)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    scripted.url = f"http://{host}:{port}"
    yield scripted
    await runner.cleanup()


async def talk(gateway: ScriptedGateway) -> list[UserTurn]:
    """What users saw until there were some dozen sessions."""
    file = io.StringIO()
    async with AsyncOpenAI(base_url=gateway.url, api_key="-", max_retries=0) as client:
        service = LiveService(client, ORDERS, partial(write_turn, file), thinking=0.0)
        await service.do("talk")
        await asyncio.wait_for(gateway.enough.wait(), 60)
        await service.do("stop")
    return [UserTurn(**json.loads(line)) for line in file.getvalue().splitlines()]


async def test_every_call_of_a_user_is_in_one_session_and_continues_it(gateway: ScriptedGateway) -> None:
    await talk(gateway)

    assert gateway.keys == {f"Bearer {KEY}"}
    for calls in gateway.sessions.values():
        assert [len(messages) for messages in calls] == [2 * n + 1 for n in range(len(calls))]
        for earlier, later in pairwise(calls):
            assert later[: len(earlier)] == earlier


async def test_each_call_is_a_turn_and_most_users_are_content(gateway: ScriptedGateway) -> None:
    turns = await talk(gateway)

    assert len(turns) == sum(map(len, gateway.sessions.values()))
    judged = [turn.accepted for turn in turns if turn.accepted is not None]
    assert sum(judged) / len(judged) > 0.9
    assert {turn.session for turn in turns} == set(gateway.sessions)
    assert not any(turn.failure for turn in turns)


async def test_a_thumb_is_about_the_last_reply_of_its_session(gateway: ScriptedGateway) -> None:
    turns = await talk(gateway)

    assert len(gateway.thumbs) == sum(turn.thumb for turn in turns) > 0
    for session, body in gateway.thumbs:
        assert body["step_index"] == len(gateway.sessions[session]) - 1
        assert body["value"] in (1.0, -1.0)


async def test_a_failed_call_is_written_with_its_cause_and_the_next_user_comes(gateway: ScriptedGateway) -> None:
    gateway.fails = True
    turns = await talk(gateway)

    assert {turn.failure for turn in turns} == {"InternalServerError 503 engine_unavailable"}
    assert len(turns) == len(gateway.sessions) >= 60
