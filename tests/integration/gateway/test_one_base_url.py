"""One base_url, `http://host:port/v1`: plain clients of three APIs are recorded there without another line of code.

The real SDKs, a real gateway and the fake engine, over real HTTP.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from stepwell.gateway.requests import CallQuota

from rig.fake_engine import FakeEngine, Reply
from rig.gateways import serve_gateway
from rig.issued_keys import CONTROL, bearer
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Role, SessionKey
from stepwell.access.key_file import KeyFile, create_key
from stepwell.gateway.recording.redaction import Redactor
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.sessions import SESSION
from tests.integration.gateway.test_sessions import live_pool, trajectories

ANN = AccessKeys([CONTROL]).session_key(SessionKey("ann"))
USER: Any = {"role": "user", "content": "hello"}
PLACE, UNRECORDED = "x-stepwell-trajectory", "x-stepwell-unrecorded"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "tiny", "max_tokens": 8, "messages": [USER]},
    "completions": {"model": "tiny", "max_tokens": 8, "prompt": "hello"},
    "messages": {"model": "tiny", "max_tokens": 8, "messages": [USER]},
    "responses": {"model": "tiny", "max_output_tokens": 8, "input": "hello"},
}
every_call = pytest.mark.parametrize("call", BODIES)
whole_and_streamed = pytest.mark.parametrize("stream", [False, True])


@asynccontextmanager
async def gateway(pool: LocalPool, engine: FakeEngine, folder: Path | None = None, **more: Any) -> AsyncIterator[str]:
    issued = KeyFile(folder / "keys.json", interval=0.0) if folder else None
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL], issued=issued, **more) as url:
        yield url


async def ask(url: str, path: str, key: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    call = next(name for name in sorted(BODIES, key=len, reverse=True) if path.endswith(name))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {**BODIES[call], **more}
        answer = await client.post(path, json=body, headers={**bearer(key), **(headers or {})})
        await answer.aread()
    return answer


async def unrecorded(url: str) -> dict[str, float]:
    """The calls that were not recorded, by cause."""
    async with httpx.AsyncClient(base_url=url) as client:
        text = (await client.get("/metrics", headers=bearer(CONTROL))).text
    rows = [line for line in text.splitlines() if line.startswith("stepwell_calls_unrecorded_total{")]
    return {row.split('"')[1]: float(row.split()[-1]) for row in rows}


async def steps_arrive(pool: LocalPool, counts: list[int]) -> None:
    await until(lambda: [len(found.steps) for found in trajectories(pool)] == counts, "the steps")


async def by_chat(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        assert (await client.models.list()).data[0].id == "tiny"
        await client.chat.completions.create(model="tiny", messages=[USER], max_tokens=8)


async def by_responses(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        await client.responses.create(model="tiny", input="hello", max_output_tokens=8)


async def by_messages(url: str, key: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        await client.messages.create(model="tiny", messages=[USER], max_tokens=8)


async def by_messages_below_v1(url: str, key: str) -> None:
    """Anthropic's SDK appends /v1 to whatever it is given."""
    await by_messages(f"{url}/v1", key)


@pytest.mark.parametrize("who", ["operator", "runner", "user"])
@pytest.mark.parametrize("client", [by_chat, by_responses, by_messages, by_messages_below_v1])
async def test_a_plain_client_is_recorded(
    tmp_path: Path, engine: FakeEngine, client: Callable[[str, str], Awaitable[None]], who: str
) -> None:
    pool, runner = live_pool(None), create_key(tmp_path / "keys.json", Role.RUNNER)[0]
    async with gateway(pool, engine, tmp_path) as url:
        await client(url, {"operator": CONTROL, "runner": runner, "user": ANN}[who])
        await steps_arrive(pool, [1])
        assert await unrecorded(url) == {}
    (session,) = trajectories(pool)
    assert session.metadata[SESSION]["user"] == ("ann" if who == "user" else "")


async def test_a_conversation_stays_one_trajectory(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with (
        gateway(pool, engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=CONTROL, max_retries=0) as client,
    ):
        messages: Any = [USER]
        for question in ("and now?", "well?"):
            answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": question}]
        await steps_arrive(pool, [2])


async def test_a_session_ends_by_itself_is_rewarded_and_is_in_a_batch(engine: FakeEngine) -> None:
    pool = live_pool(0.5)
    async with gateway(pool, engine) as url:
        place = (await ask(url, "/v1/chat/completions", CONTROL)).headers[PLACE]
        async with httpx.AsyncClient(base_url=url) as client:
            given = await client.post(f"/{place}/v1/feedback", json={"value": 0.75}, headers=bearer(CONTROL))
        assert given.json() == {"status": "counted"}
        await until(lambda: [found.completed for found in trajectories(pool)] == [True], "the idle end")
    (step,) = pool.taken()
    assert (f"{step.trajectory_uid}/{step.prompt_uid}", step.reward, step.untrainable) == (place, 0.75, None)


@whole_and_streamed
@every_call
async def test_a_call_below_unrecorded_says_that_it_is_not_recorded(
    engine: FakeEngine, call: str, stream: bool
) -> None:
    pool = live_pool(None)
    async with gateway(pool, engine) as url:
        answer = await ask(url, f"/unrecorded/v1/{call}", CONTROL, stream=stream)
        assert (answer.status_code, answer.headers[UNRECORDED]) == (200, "unrecorded_url")
        assert PLACE not in answer.headers
        assert await unrecorded(url) == {"unrecorded_url": 1.0}
    assert trajectories(pool) == []


@whole_and_streamed
@every_call
async def test_a_recorded_call_does_not(engine: FakeEngine, call: str, stream: bool) -> None:
    pool = live_pool(None)
    async with gateway(pool, engine) as url:
        answer = await ask(url, f"/v1/{call}", CONTROL, stream=stream)
        assert UNRECORDED not in answer.headers
        await steps_arrive(pool, [1])
        assert answer.headers[PLACE].partition("/")[0] == trajectories(pool)[0].uid


async def test_generated_tokens_are_not_recorded_and_say_so(engine: FakeEngine) -> None:
    async with gateway(live_pool(None), engine) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"prompt_ids": [1, 2], "sampling_params": {"max_tokens": 4}}
        answer = await client.post("/generate", json=body, headers=bearer(CONTROL))
        assert (answer.status_code, answer.headers[UNRECORDED]) == (200, "unrecorded_url")
        assert await unrecorded(url) == {"unrecorded_url": 1.0}


@whole_and_streamed
async def test_a_session_outside_the_sample_says_so(engine: FakeEngine, stream: bool) -> None:
    pool = live_pool(None)
    async with gateway(pool, engine, session_sample=0.0) as url:
        for headers in ({}, {"x-session-id": "one"}):
            answer = await ask(url, "/v1/chat/completions", CONTROL, headers, stream=stream)
            assert answer.headers[UNRECORDED] == "sample"
        assert await unrecorded(url) == {"sample": 2.0}
    assert trajectories(pool) == []


async def test_a_call_that_a_full_pool_does_not_take_says_so(engine: FakeEngine) -> None:
    pool = live_pool(None, max_queue_size=1, overflow=Overflow.REFUSE)
    async with gateway(pool, engine) as url:
        assert PLACE in (await ask(url, "/v1/chat/completions", CONTROL)).headers
        answer = await ask(url, "/v1/chat/completions", CONTROL)
        assert (answer.status_code, answer.headers[UNRECORDED]) == (200, "pool")


@pytest.mark.parametrize("root", ["/v1", "/v1/v1", "/session/v1"])
async def test_an_environments_key_is_told_where_its_calls_go(tmp_path: Path, engine: FakeEngine, root: str) -> None:
    door = create_key(tmp_path / "keys.json", Role.ENVIRONMENT)[0]
    async with gateway(live_pool(None), engine, tmp_path) as url:
        refused = await ask(url, f"{root}/chat/completions", door)
        assert refused.status_code == 403
        assert refused.json()["error"]["message"].endswith("which are not recorded, go to /unrecorded/v1")
        assert (await ask(url, "/unrecorded/v1/chat/completions", door)).status_code == 200


async def test_a_users_key_cannot_hide_its_calls(engine: FakeEngine) -> None:
    async with gateway(live_pool(None), engine) as url:
        refused = await ask(url, "/unrecorded/v1/chat/completions", ANN)
        assert refused.status_code == 403
        assert refused.json()["error"]["message"].endswith("which are recorded, go to /v1")


async def test_the_sessions_of_a_key_for_a_channel_are_in_its_channel(tmp_path: Path, engine: FakeEngine) -> None:
    pool, keys = live_pool(None), tmp_path / "keys.json"
    math, logic = (create_key(keys, Role.RUNNER, channels=[name])[0] for name in ("math", "logic"))
    project = create_key(keys, Role.RUNNER, projects=["search"])[0]
    engine.replies.extend([Reply("hi"), Reply("hi"), Reply("hi")])
    async with gateway(pool, engine, tmp_path) as url:
        await ask(url, "/v1/chat/completions", math)
        same: Any = [USER, {"role": "assistant", "content": "hi"}, USER]
        assert (await ask(url, "/v1/chat/completions", logic, messages=same)).status_code == 200
        assert (await ask(url, "/v1/chat/completions", math, messages=same)).status_code == 200
        await steps_arrive(pool, [2, 1])
        refused = await ask(url, "/v1/chat/completions", project)
        assert refused.status_code == 403
        assert "this is in the channel train" in refused.json()["error"]["message"]
    assert [found.group.channel for found in trajectories(pool)] == ["math", "logic"]


@pytest.mark.parametrize("uid", ["v1", "session", "unrecorded"])
@pytest.mark.parametrize("session", [False, True])
async def test_no_trajectory_has_a_name_that_begins_other_urls(engine: FakeEngine, uid: str, session: bool) -> None:
    async with gateway(live_pool(None), engine) as url, httpx.AsyncClient(base_url=url) as client:
        wanted = {"trajectory_uid": uid, "session": session}
        refused = await client.post("/init_trajectory", json=wanted, headers=bearer(CONTROL))
    assert refused.status_code == 400
    assert "is no uid, because other URLs contain it" in refused.json()["error"]["message"]


async def test_a_users_quota_holds(engine: FakeEngine) -> None:
    async with gateway(live_pool(None), engine, quota=CallQuota(bytes=1_000)) as url:
        assert (await ask(url, "/v1/chat/completions", ANN)).status_code == 200
        refused = await ask(url, "/v1/chat/completions", ANN, user="x" * 2_000)
        assert refused.status_code == 429


async def test_redaction_holds(engine: FakeEngine, tiny_model: Path) -> None:
    pool = live_pool(0.5)
    redactor = Redactor("stepwell.gateway.recording.redaction_examples:mail_addresses", str(tiny_model), timeout=60.0)
    async with gateway(pool, engine, redactor=redactor) as url:
        await until(lambda: redactor.why_not_ready() is None, "the function to be loaded")
        said: Any = [{"role": "user", "content": "I am ann@example.org"}]
        assert (await ask(url, "/v1/chat/completions", CONTROL, messages=said)).status_code == 200
        await until(lambda: [found.completed for found in trajectories(pool)] == [True], "the idle end")
    (step,) = pool.taken()
    assert (step.untrainable or "").startswith("redacted: ")


async def test_capture_off_holds(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with gateway(pool, engine) as url:
        answer = await ask(url, "/v1/chat/completions", CONTROL, {"x-stepwell-capture": "off"})
        assert (answer.status_code, answer.headers[UNRECORDED]) == (200, "header")
    assert trajectories(pool) == []


@pytest.mark.parametrize("client", [by_chat, by_responses, by_messages])
async def test_a_base_url_without_v1_is_told_the_right_one(
    engine: FakeEngine, client: Callable[[str, str], Awaitable[None]]
) -> None:
    """By the SDKs' own errors. Anthropic's appends /v1 by itself, so its path is asked for directly."""
    async with gateway(live_pool(None), engine) as url:
        if client is by_messages:
            refused = await ask(url, "/messages", CONTROL)
            assert refused.status_code == 404
            assert refused.json()["error"]["message"].endswith(f"is {url}/v1")
            assert refused.json()["type"] == "error"
            return
        async with openai.AsyncOpenAI(base_url=url, api_key=CONTROL, max_retries=0) as sdk:
            with pytest.raises(openai.NotFoundError, match=f"the base_url of this gateway is {url}/v1"):
                if client is by_chat:
                    await sdk.chat.completions.create(model="tiny", messages=[USER])
                else:
                    await sdk.responses.create(model="tiny", input="hello")
