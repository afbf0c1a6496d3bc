"""Sessions that are opened by a first call with a session key: real gateways and the fake engine, over real HTTP."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from rig.docs_pages import DOCS, blocks
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import SessionKey
from stepwell.pool.api.sessions import CLIENT, SESSION
from tests.integration.gateway.test_sessions import live_pool, trajectories

CONTROL = "a-control-key-of-the-operator"
KEYS = AccessKeys([CONTROL])
ANN, BOB = (KEYS.session_key(SessionKey(user)) for user in ("ann", "bob"))
UNCAPTURED = KEYS.session_key(SessionKey("ann", is_captured=False))

Messages = list[dict[str, Any]]


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def chat(
    url: str, key: str, messages: Messages, headers: dict[str, str] | None = None, **more: Any
) -> tuple[Messages, str]:
    """The conversation with its reply, and the trajectory that it belongs to; empty if it is not recorded."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, **more}
    headers = {"Authorization": f"Bearer {key}", **(headers or {})}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/session/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        said = await answer.json()
        assert answer.status == 200, said
        place = answer.headers.get("x-stepwell-trajectory", "")
    return [*messages, said["choices"][0]["message"]], place.partition("/")[0]


async def counted(url: str, cause: str) -> bool:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {CONTROL}"}) as http,
        http.get(f"{url}/metrics") as metrics,
    ):
        return f'stepwell_calls_unrecorded_total{{cause="{cause}"}} 1.0' in await metrics.text()


async def steps_arrive(pool: LocalPool, counts: Sequence[int]) -> None:
    await until(lambda: [len(found.steps) for found in trajectories(pool)] == list(counts), "the steps")


async def test_conversations_are_told_apart_by_what_their_messages_continue(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        first, one = await chat(url, ANN, [asks("hello")])
        other, two = await chat(url, ANN, [asks("good morning")])
        assert one != two
        first, again = await chat(url, ANN, [*first, asks("and now?")])
        assert again == one
        assert (await chat(url, ANN, [*other, asks("well?")]))[1] == two
        branch = [*first[:2], asks("something else")]
        assert (await chat(url, ANN, branch))[1] == one
        await steps_arrive(pool, [3, 2])
    sessions = [found.metadata[SESSION] for found in trajectories(pool)]
    assert sessions == [{"id": one, "user": "ann"}, {"id": two, "user": "ann"}]


async def test_the_service_of_the_page_on_live_traffic_is_recorded_as_a_session(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [found for found in blocks(DOCS / "live.md", "python") if "SESSION_KEY" in found.code]
    monkeypatch.setenv("SESSION_KEY", ANN)
    pool, scope = live_pool(None), dict[str, Any]()
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        await asyncio.to_thread(exec, block.code.replace("http://127.0.0.1:8100", url), scope)
        await steps_arrive(pool, [1])
    assert scope["reply"].choices[0].message.content
    (session,) = [found.metadata[SESSION] for found in trajectories(pool)]
    assert session["user"] == "ann"


async def test_a_client_names_its_conversation_by_a_header(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        places = [
            (await chat(url, ANN, [asks(text)], {name: value}))[1]
            for text, name, value in (
                ("a", "x-session-id", "one"),
                ("b", "X-Claude-Code-Session-Id", "one"),
                ("c", "session-id", "two"),
            )
        ]
        assert places[0] == places[1] != places[2]
        await steps_arrive(pool, [2, 1])


async def test_two_users_never_share_a_session(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        talk, anns = await chat(url, ANN, [asks("hello")], {"x-session-id": "one"})
        assert (await chat(url, BOB, [asks("hello")], {"x-session-id": "one"}))[1] != anns
        talk, anns = await chat(url, ANN, [asks("hello")])
        assert (await chat(url, BOB, [*talk, asks("and now?")]))[1] != anns
        await steps_arrive(pool, [1, 1, 1, 1])
    assert [found.metadata[SESSION]["user"] for found in trajectories(pool)] == ["ann", "bob", "ann", "bob"]


async def test_a_conversation_goes_on_at_another_gateway(engine: FakeEngine) -> None:
    pool = live_pool(None, shards=2)
    other = LocalPool(transport=lambda _: pool.transport, shards=2)  # type: ignore[arg-type]
    async with (
        serve_gateway(pool, [engine.url], control_keys=[CONTROL], bridge=ThinkingPolicy.TEMPLATE) as first,
        serve_gateway(other, [engine.url], control_keys=[CONTROL], bridge=ThinkingPolicy.TEMPLATE) as second,
    ):
        talk, one = await chat(first, ANN, [asks("hello")])
        await steps_arrive(pool, [1])
        talk, again = await chat(second, ANN, [*talk, asks("and now?")])
        assert again == one
        await steps_arrive(pool, [2])
        assert (await chat(first, ANN, [*talk, asks("well?")]))[1] == one


async def test_an_idle_conversation_goes_on_in_a_successor(engine: FakeEngine) -> None:
    pool = live_pool(0.3)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        talk, one = await chat(url, ANN, [asks("hello")])
        await until(lambda: trajectories(pool)[0].completed, "the idle end")
        _, two = await chat(url, ANN, [*talk, asks("and now?")])
    assert trajectories(pool)[1].metadata[SESSION] == {"id": one, "user": "ann", "predecessor": one}
    assert two == trajectories(pool)[1].uid


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {"model": "tiny", "max_tokens": 8, "messages": [asks("hello")]}),
        ("responses", {"model": "tiny", "max_output_tokens": 8, "input": "hello"}),
        ("completions", {"model": "tiny", "max_tokens": 8, "prompt": "hello"}),
        ("chat/completions", {"model": "tiny", "max_tokens": 8, "messages": [asks("hello")], "stream": True}),
    ],
)
async def test_every_dialect_opens_a_session(engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
    pool = live_pool(None)
    async with (
        serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url,
        aiohttp.ClientSession(headers={"x-api-key": ANN}) as http,
        http.post(f"{url}/session/v1/{path}", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        await answer.read()
        await steps_arrive(pool, [1])
        assert answer.headers["x-stepwell-trajectory"].partition("/")[0] == trajectories(pool)[0].uid


async def test_a_session_key_may_open_sessions_and_nothing_else(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        _, uid = await chat(url, ANN, [asks("hello")])

        async def status(
            method: str, path: str, body: Any = None, key: str = ANN, headers: dict[str, str] | None = None
        ) -> int:
            headers = {"Authorization": f"Bearer {key}"} if headers is None else headers
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.request(method, f"{url}{path}", json=body) as answer,
            ):
                return answer.status

        own = f"/{uid}/session@{uid}"
        hello = {"model": "tiny", "messages": [asks("hello")]}
        for path in (f"{own}/v1/chat/completions", f"{own}/feedback", f"{own}/complete_trajectory", "/session_keys"):
            assert await status("POST", path, hello) == 403, path
        for path in ("/v1/feedback", "/session/v1/feedback", "/session/v1/complete_trajectory", "/generate"):
            assert await status("POST", path, hello) == 403, path
        assert await status("POST", "/unrecorded/v1/chat/completions", hello) == 403
        for path in ("/metrics", "/engines", "/pacing", "/unrecorded/v1/models"):
            assert await status("GET", path) == 403, path
        assert [await status("GET", f"{root}/models") for root in ("/v1", "/session/v1", "/session")] == [200] * 3
        for wanted in ({"prompt_uid": "p"}, {"trajectory_uid": "t"}, {"channel": "c"}, {"user": "bob"}):
            assert await status("POST", "/init_trajectory", wanted) == 403
        assert await status("POST", "/init_trajectory", {"metadata": {"a": 1}}) == 200
        hidden = {"Authorization": "Bearer nonsense", "x-api-key": ANN}
        assert await status("POST", "/init_trajectory", {"prompt_uid": "p"}, headers=hidden) == 403
        for wrong in ("nonsense", ANN[:-1] + ("A" if ANN[-1] != "A" else "B"), f"{BOB.partition('.')[0]}.{ANN[-43:]}"):
            assert await status("POST", "/session/v1/chat/completions", hello, wrong) == 401
    await until(lambda: len(trajectories(pool)) == 2, "the second session")
    assert trajectories(pool)[1].metadata == {
        CLIENT: {"a": 1},
        SESSION: {"id": trajectories(pool)[1].uid, "user": "ann"},
    }


async def test_an_operator_issues_keys(engine: FakeEngine) -> None:
    headers = {"Authorization": f"Bearer {CONTROL}"}
    async with (
        serve_gateway(live_pool(None), [engine.url], control_keys=[CONTROL]) as url,
        aiohttp.ClientSession(url, headers=headers) as http,
    ):
        async with http.post("/session_keys", json={"user": "ann"}) as answer:
            assert await answer.json() == {"user": "ann", "base_url": f"{url}/v1", "api_key": ANN}
        async with http.post("/session_keys", json={"user": "ann", "capture": False}) as answer:
            assert (await answer.json())["api_key"] == UNCAPTURED


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("key", "headers", "cause"), [(UNCAPTURED, {}, "key"), (CONTROL, {"x-stepwell-capture": "off"}, "header")]
)
async def test_a_call_that_is_not_to_be_captured_leaves_nothing(
    engine: FakeEngine, key: str, headers: dict[str, str], cause: str, stream: bool
) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        body = {"model": "tiny", "messages": [asks("hello")], "max_tokens": 8, "stream": stream}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}", **headers}) as http,
            http.post(f"{url}/session/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status == 200
            text = await answer.text()
            assert "policy_version" not in text
            assert ("[DONE]" in text) is stream
            assert "x-stepwell-trajectory" not in answer.headers
        assert await counted(url, cause)
    assert trajectories(pool) == []
    assert (await pool.stats()).submitted == 0


async def test_a_session_can_be_opened_without_capture(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with (
        serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url,
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {CONTROL}"}) as http,
    ):
        async with http.post("/init_trajectory", json={"session": True, "capture": False}) as answer:
            opened = await answer.json()
        headers = {"Authorization": f"Bearer {opened['api_key']}"}
        body = {"model": "tiny", "messages": [asks("hello")]}
        path = f"/{opened['trajectory_uid']}/{opened['prompt_uid']}/v1/chat/completions"
        async with http.post(path, json=body, headers=headers) as answer:
            assert answer.status == 200
        other = path.replace("unrecorded@", "session@")
        async with http.post(other, json=body, headers=headers) as answer:
            assert answer.status == 401
        assert await counted(url, "session")
    assert trajectories(pool) == []


async def test_a_call_of_a_rollout_can_be_left_out_too_and_the_rest_is_recorded(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        await http.post("/init_trajectory", json={"trajectory_uid": "t", "prompt_uid": "p"})
        body = {"model": "tiny", "messages": [asks("hello")]}
        for capture, status in (("off", 200), ("on", 200), ("no", 400)):
            headers = {"x-stepwell-capture": capture}
            async with http.post("/t/p/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == status
        async with http.post("/t/q/v1/chat/completions", json=body, headers={"x-stepwell-capture": "off"}) as answer:
            assert answer.status == 404
        await steps_arrive(pool, [1])
    assert (await pool.stats()).submitted == 1


async def test_a_share_of_sessions_is_recorded_and_stays_so(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with (
        serve_gateway(pool, [engine.url], control_keys=[CONTROL], session_sample=0.5) as first,
        serve_gateway(pool, [engine.url], control_keys=[CONTROL], session_sample=0.5) as second,
    ):
        named = [
            [(await chat(url, ANN, [asks("hello")], {"x-session-id": str(n)}))[1] for url in (first, second)]
            for n in range(16)
        ]
        assert all(one == other for one, other in named)
        assert 0 < sum(one != "" for one, _ in named) < 16
        unnamed = []
        for n in range(16):
            talk, one = await chat(first, ANN, [asks(f"hello {n}")])
            unnamed.append((one, (await chat(second, ANN, [*talk, asks("and now?")]))[1]))
        assert all((one == "") == (other == "") for one, other in unnamed)
        assert 0 < sum(one != "" for one, _ in unnamed) < 16
