"""A black-box agent's calls: a real gateway and the fake engine, over real HTTP; the pool's rules in memory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.access.route_table import BELOW_A_TRAJECTORY
from stepwell.pool.api.plan import Overflow
from stepwell.steps.step import Exactness

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@pytest.fixture
async def http(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def init(http: aiohttp.ClientSession, **wanted: Any) -> str:
    """The path of a new trajectory."""
    status, opened = await post(http, "/init_trajectory", wanted)
    assert status == 200, opened
    return f"/{opened['trajectory_uid']}/{opened['prompt_uid']}"


async def complete(http: aiohttp.ClientSession, path: str, **wanted: Any) -> str:
    status, ended = await post(http, f"{path}/v1/complete_trajectory", wanted)
    assert status == 200, ended
    return str(ended["status"])


async def known_version(http: aiohttp.ClientSession, version: int) -> None:
    """Returns once the gateway knows that the engine has it."""
    async with asyncio.timeout(60):
        while True:
            async with http.get("/engines") as listed:
                if (await listed.json())["engines"][0]["weight_version"] == str(version):
                    return
            await asyncio.sleep(0.01)


async def test_every_call_becomes_a_step_with_the_engines_own_tokens(
    http: aiohttp.ClientSession, pool: LocalPool, engine: FakeEngine
) -> None:
    path = await init(http)
    asked = {**HELLO, "logprobs": True, "return_token_ids": True, "seed": 1, "temperature": 0.5}
    _, answer = await post(http, f"{path}/v1/chat/completions", asked)
    assert await complete(http, path, reward=0.75) == "completed"
    (step,) = pool.taken()
    assert step.prompt_ids.tolist() == answer["prompt_token_ids"]
    assert step.response_ids.tolist() == answer["choices"][0]["token_ids"]
    assert step.response_logprobs is not None
    told = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert step.response_logprobs.tolist() == pytest.approx(told)
    assert (step.reward, step.step_index, step.is_last) == (0.75, 0, True)
    assert (step.exactness, step.finish_reason) == (Exactness.ENGINE, answer["choices"][0]["finish_reason"])
    assert {"temperature": 0.5, "seed": 1, "max_tokens": 8}.items() <= step.sampling.items()
    (seen,) = [seen for seen in engine.requests if "chat" in seen.path]
    assert seen.body.items() >= {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}.items()


async def test_the_agent_gets_only_what_it_asked_for(http: aiohttp.ClientSession) -> None:
    path = await init(http)
    _, answer = await post(http, f"{path}/v1/chat/completions", HELLO)
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("below", BELOW_A_TRAJECTORY)
async def test_every_spelling_of_the_base_url_works(http: aiohttp.ClientSession, pool: LocalPool, below: str) -> None:
    path = await init(http)
    for call in ("chat/completions", "register_trajectory", "complete_trajectory"):
        status, answer = await post(http, f"{path}{below}/{call}", HELLO if "chat" in call else {})
        assert status == 200, answer
    async with http.get(f"{path}{below}/models") as models:
        assert (await models.json())["data"][0]["id"] == "tiny"
    assert len(pool.taken()) == 1


async def test_the_base_url_names_the_host_the_agent_used(http: aiohttp.ClientSession) -> None:
    async with http.post("/init_trajectory", headers={"Host": "localhost:8100"}) as answer:
        assert (await answer.json())["base_url"].startswith("http://localhost:8100/")


async def test_trajectories_without_a_prompt_uid_have_a_group_each(
    http: aiohttp.ClientSession, pool: LocalPool
) -> None:
    for path in [await init(http), await init(http)]:
        await post(http, f"{path}/v1/chat/completions", HELLO)
        await complete(http, path)
    assert pool.rules.stats().channels["train"].ready_groups == 2


async def test_trajectories_of_one_prompt_uid_come_out_together(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    paths = [await init(http, prompt_uid="task-1", group_size=4, metadata={"level": 3}) for _ in range(4)]
    for path in paths:
        assert pool.rules.take(1) is None
        await post(http, f"{path}/v1/chat/completions", HELLO)
        await complete(http, path)
    steps = pool.taken()
    assert {step.prompt_uid for step in steps} == {"task-1"}
    assert len({step.trajectory_uid for step in steps}) == 4
    assert all(step.metadata == {"level": 3} for step in steps)


async def test_registering_sets_channel_and_metadata(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    path = await init(http)
    await post(http, f"{path}/v1/register_trajectory", {"channel": "validation", "metadata": {"source": "gsm"}})
    await post(http, f"{path}/v1/chat/completions", HELLO)
    assert await complete(http, path, channel="validation") == "completed"
    (step,) = pool.taken("validation")
    assert step.metadata == {"source": "gsm"}
    assert pool.rules.take(1) is None


async def test_a_trajectory_completed_into_another_channel_is_a_conflict(http: aiohttp.ClientSession) -> None:
    path = await init(http, channel="validation")
    await post(http, f"{path}/v1/chat/completions", HELLO)
    status, answer = await post(http, f"{path}/v1/complete_trajectory", {"channel": "train"})
    assert (status, answer["error"]["code"]) == (409, "conflict")
    assert "already has steps in channel 'validation'" in answer["error"]["message"]


async def test_the_policy_version_is_that_of_the_moment_of_sampling(
    http: aiohttp.ClientSession, pool: LocalPool, engine: FakeEngine
) -> None:
    path = await init(http)
    for version in (3, 4):
        engine.weight_version = str(version)
        await known_version(http, version)
        await pool.set_policy_version(version)
        await post(http, f"{path}/v1/chat/completions", HELLO)
    await complete(http, path)
    assert [step.policy_version for step in pool.taken()] == [3, 4]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "why"),
    [
        ("/no-one/1/v1/chat/completions", HELLO, 404, "unknown_trajectory", "POST /init_trajectory"),
        ("/no-one/1/v1/complete_trajectory", {}, 404, "unknown_trajectory", "no trajectory no-one"),
        ("/no-one/1/v1/abort_trajectory", {}, 404, "unknown_trajectory", "no trajectory no-one"),
        ("/v1/embeddings", HELLO, 404, "unknown_address", "there is no /v1/embeddings here"),
        ("/OPEN/v1/chat/completions", {**HELLO, "stream": 1}, 400, "bad_request", "stream must be true or false"),
        ("/OPEN/v1/chat/completions", {"model": "tiny"}, 400, "bad_request", "messages must be a list"),
        ("/OPEN/v1/chat/completions", {**HELLO, "model": "nope"}, 404, "model_not_found", "does not exist"),
        ("/OPEN/v1/complete_trajectory", {"reward": "good"}, 400, "bad_request", "reward must be a number"),
        ("/OPEN/v1/complete_trajectory", {"rewrad": 1}, 400, "bad_request", "rewrad: "),
        ("/init_trajectory", {"prompt_uid": "a/b"}, 400, "bad_request", "prompt_uid: "),
        ("/init_trajectory", {"group_size": 0}, 400, "bad_request", "group_size must be at least 1"),
        ("/nowhere", {}, 404, "not_found", "POST /nowhere"),
        ("/OPEN/v1/collective_rpc", {}, 404, "not_found", "Not Found"),
    ],
)
async def test_a_refusal_is_an_openai_error_that_says_why(
    http: aiohttp.ClientSession, path: str, body: Any, status: int, code: object, why: str
) -> None:
    opened = await init(http)
    got, answer = await post(http, path.replace("/OPEN", opened), body)
    assert got == status
    assert answer["error"]["code"] == code
    assert why in answer["error"]["message"]
    assert answer["error"]["type"]


async def test_a_reward_that_is_not_a_number_is_refused(http: aiohttp.ClientSession) -> None:
    path = await init(http)
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{path}/v1/complete_trajectory", data=b'{"reward": NaN}', headers=headers) as answer:
        assert answer.status == 400


async def test_an_agent_never_waits_for_the_pool(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    path = await init(http)
    await post(http, f"{path}/v1/chat/completions", HELLO)
    pool.away = True
    async with asyncio.timeout(30):
        status, _ = await post(http, f"{path}/v1/chat/completions", HELLO)
    assert status == 200
    pool.away = False
    assert await complete(http, path) == "completed"
    assert [step.step_index for step in pool.taken()] == [0, 1]


async def test_without_a_pool_a_new_trajectory_gets_a_503(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    pool.away = True
    status, answer = await post(http, "/init_trajectory")
    assert (status, answer["error"]["code"], answer["error"]["message"]) == (
        503,
        "pool_unavailable",
        "the pool is away",
    )


async def test_a_full_pool_sends_new_trajectories_away_for_a_while(engine: FakeEngine) -> None:
    pool = LocalPool(max_queue_size=1, overflow=Overflow.REFUSE)
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        running = await init(http)
        async with http.post("/init_trajectory") as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "5")
            assert (await answer.json())["error"]["code"] == "pool_full"
        assert (await post(http, f"{running}/v1/chat/completions", HELLO))[0] == 200
        assert await complete(http, running) == "completed"


async def test_producers_can_read_how_much_they_may_start(engine: FakeEngine) -> None:
    pool = LocalPool(batch_size=4, max_staleness=1, group_deadline=900.0)
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        await init(http)
        async with http.get("/pacing") as answer:
            assert await answer.json() == {
                "may_start": 7,
                "waits_for": "",
                "in_flight": 1,
                "queued": 0,
                "refills": [],
                "group_deadline": 900.0,
                "missing": [],
            }


async def test_a_trajectory_the_pool_has_dropped_is_refused_at_the_second_call_at_the_latest(
    http: aiohttp.ClientSession, pool: LocalPool, engine: FakeEngine
) -> None:
    path = await init(http)
    pool.rules.abort(*path.strip("/").split("/"))
    assert (await post(http, f"{path}/v1/chat/completions", HELLO))[0] == 200
    await until(lambda: pool.rules.stats().refused["late"] == 1, "the step to be refused")
    asked = engine.request_count
    status, answer = await post(http, f"{path}/v1/chat/completions", HELLO)
    assert (status, answer["error"]["code"]) == (404, "unknown_trajectory")
    assert engine.request_count == asked, "the engine was asked for a step that has no place to go"


@pytest.mark.parametrize(
    ("faults", "status", "why"),
    [
        (Faults(malformed="not_json"), 502, "not JSON"),
        (Faults(malformed="no_choices"), 502, "no choices"),
        (Faults(disconnect_at_token=2), 502, "broke off"),
        (Faults(error_status=500), 500, ""),
        (Faults(error_status=400), 400, ""),
    ],
)
async def test_an_engine_that_fails_gives_the_agent_an_error_and_the_pool_nothing(
    http: aiohttp.ClientSession, pool: LocalPool, engine: FakeEngine, faults: Faults, status: int, why: str
) -> None:
    path = await init(http)
    engine.faults = faults
    got, answer = await post(http, f"{path}/v1/chat/completions", HELLO)
    assert got == status
    assert why in answer["error"]["message"]
    assert pool.rules.stats().submitted == 0


async def test_a_prompt_longer_than_a_trainer_takes_is_answered_and_quarantined(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with (
        serve_gateway(pool, [engine.url], prompt_length=5, response_length=3) as url,
        aiohttp.ClientSession(url) as http,
    ):
        path = await init(http)
        status, answer = await post(http, f"{path}/v1/chat/completions", HELLO)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        await complete(http, path)
    assert pool.rules.stats().quarantined == {"prompt_too_long": 1}


async def test_calls_go_to_the_engines_in_turn_and_past_one_that_is_gone(pool: LocalPool) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        gone = FakeEngine()
        async with gone:
            pass
        urls = [first.url, gone.url, second.url]
        async with serve_gateway(pool, urls) as url, aiohttp.ClientSession(url) as http:
            path = await init(http)
            for _ in range(6):
                assert (await post(http, f"{path}/v1/chat/completions", HELLO))[0] == 200
        calls = [sum("chat" in seen.path for seen in engine.requests) for engine in (first, second)]
        assert calls == [3, 3]


async def test_when_no_engine_can_be_reached_the_agent_is_told_which(pool: LocalPool) -> None:
    async with FakeEngine() as gone:
        pass
    async with serve_gateway(pool, [gone.url]) as url, aiohttp.ClientSession(url) as http:
        path = await init(http)
        status, answer = await post(http, f"{path}/v1/chat/completions", HELLO)
    assert (status, answer["error"]["code"]) == (502, "engine_unavailable")
    assert gone.url in answer["error"]["message"]


async def test_the_last_steps_reach_the_pool_when_the_gateway_is_told_to_end(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        path = await init(http)
        pool.away = True
        await post(http, f"{path}/v1/chat/completions", HELLO)
        pool.away = False
    assert pool.rules.stats().channels["train"].accepted.steps == 1
