"""Chat at the gateway's root, for environments: every token told, nothing recorded."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rig.chatml import render_chat
from rig.fake_engine import FakeEngine, Faults, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO
from rig.vocabulary import END_OF_TURN, encode
from rig.waiting import until
from stepwell.common.tokenizers import load_tokenizer

CONTROL = "control-key-of-the-tests"
PROMPT_IDS = encode(render_chat(HELLO["messages"]))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

Client = openai.AsyncOpenAI


@pytest.fixture
async def client(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Client]:
    async with serve_gateway(pool, [engine.url]) as url, client_of(url) as client:
        yield client


def client_of(url: str, key: str = "not-needed") -> Client:
    return Client(base_url=f"{url}/unrecorded/v1", api_key=key, max_retries=0)


async def ask(client: Client, **wanted: Any) -> dict[str, Any]:
    answer = await client.chat.completions.create(**{**HELLO, **wanted})
    return dict(answer.model_dump())


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def test_a_chat_is_answered_with_every_token_and_nothing_is_recorded(
    client: Client, engine: FakeEngine, pool: LocalPool
) -> None:
    engine.replies.append(Reply("Hi there"))
    answer = await ask(client)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == PROMPT_IDS
    assert choice["message"]["content"] == "Hi there"
    assert choice["token_ids"] == [*encode("Hi there"), END_OF_TURN]
    assert len(logprobs_of(choice)) == len(choice["token_ids"])
    assert choice["exactness"] == "engine"
    assert pool.transport.messages == []
    assert pool.rules.stats().submitted == 0


async def test_what_is_sampled_is_explicit_and_bounded(client: Client, engine: FakeEngine) -> None:
    await ask(client, max_tokens=5000)
    asked = engine.requests[-1].body
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (1.0, 1.0, 0, 64)


async def test_every_choice_has_its_own_tokens(client: Client) -> None:
    answer = await ask(client, n=3)
    written = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert len(set(written)) == 3
    assert all(len(logprobs_of(choice)) == len(choice["token_ids"]) for choice in answer["choices"])


async def test_reasoning_and_tool_calls_are_told_apart_and_their_tokens_are_all_there(
    client: Client, engine: FakeEngine
) -> None:
    reply = Reply("So:", (ToolCall("add", {"a": 1}),), reasoning="hm")
    engine.replies.append(reply)
    (choice,) = (await ask(client, tools=[TOOL], max_tokens=64))["choices"]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert choice["token_ids"] == reply.ids()[:64]


async def test_a_completion_names_its_prompt_with_each_choice(client: Client, engine: FakeEngine) -> None:
    engine.replies.append(Reply(" upon a time"))
    (choice,) = (await client.completions.create(model="tiny", prompt="Once", max_tokens=24)).model_dump()["choices"]
    assert choice["prompt_token_ids"] == encode("Once")
    assert choice["token_ids"] == [*encode(" upon a time"), END_OF_TURN]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


async def test_the_engines_version_is_told_and_certain_where_it_did_not_change(
    client: Client, engine: FakeEngine
) -> None:
    engine.weight_version = "6"
    async with asyncio.timeout(60):
        while (choice := (await ask(client))["choices"][0])["policy_version"] != 6:
            await asyncio.sleep(0.01)
    assert choice["version_spans"] == [[6, 0, len(choice["token_ids"])]]
    engine.faults = Faults(version_change_at_token=3, new_version="7", times=1)
    (choice,) = (await ask(client))["choices"]
    assert (choice["policy_version"], choice["version_spans"]) == (6, [])


async def test_version_0_is_told_while_no_one_has_named_another(client: Client) -> None:
    (choice,) = (await ask(client))["choices"]
    assert (choice["policy_version"], choice["version_spans"]) == (0, [])


async def test_an_answer_that_was_broken_off_is_carried_on(client: Client, engine: FakeEngine) -> None:
    engine.faults = Faults(abort_at_token=5, times=1)
    engine.replies.extend([Reply("four and twenty"), Reply("and twenty")])
    (choice,) = (await ask(client))["choices"]
    assert choice["message"]["content"] == "four and twenty"
    assert choice["token_ids"] == [*encode("four and twenty"), END_OF_TURN]


async def test_a_call_waits_while_the_engine_is_paused(client: Client, engine: FakeEngine) -> None:
    engine.pause()
    looked = engine.asked["/is_paused"]
    await until(lambda: engine.asked["/is_paused"] > looked + 2, "the gateway to see the pause")
    asking = asyncio.create_task(ask(client))
    looked = engine.asked["/is_paused"]
    await until(lambda: engine.asked["/is_paused"] > looked + 2, "the gateway to look again")
    assert not asking.done()
    assert engine.in_flight == 0
    engine.resume()
    assert (await asking)["choices"][0]["token_ids"]


async def test_another_engine_answers_where_one_hangs_up(pool: LocalPool, engine: FakeEngine) -> None:
    async with FakeEngine() as other, serve_gateway(pool, [engine.url, other.url]) as url, client_of(url) as client:
        engine.faults = Faults(hang_up=True)
        for _ in range(2):
            assert (await ask(client))["choices"][0]["token_ids"]
    assert other.request_count == 2


@pytest.mark.parametrize(
    "faults", [Faults(drop_ids=True), Faults(short_ids=True), Faults(logprob_value=-9999.0), Faults(wrong_usage=True)]
)
async def test_tokens_that_do_not_add_up_are_a_failure_that_may_be_tried_again(
    client: Client, engine: FakeEngine, faults: Faults
) -> None:
    engine.faults = faults
    with pytest.raises(openai.InternalServerError, match="cannot be trained on"):
        await ask(client)


async def test_a_stream_has_what_it_asks_for_and_nothing_is_recorded(
    client: Client, engine: FakeEngine, pool: LocalPool
) -> None:
    engine.replies.extend([Reply("Hi there"), Reply("Hi there")])
    told = [chunk.model_dump() async for chunk in await client.chat.completions.create(**HELLO, stream=True)]
    assert "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in told) == "Hi there"
    assert all(chunk["choices"][0].get("token_ids") is None for chunk in told)
    asked: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    exact = [chunk.model_dump() async for chunk in await client.chat.completions.create(**HELLO, stream=True, **asked)]
    ids = [token for chunk in exact for token in chunk["choices"][0].get("token_ids") or []]
    assert ids == [*encode("Hi there"), END_OF_TURN]
    assert pool.transport.messages == []


@pytest.mark.parametrize("faults", [Faults(short_ids=True), Faults(logprob_value=-9999.0)])
async def test_a_stream_whose_tokens_do_not_add_up_ends_in_an_error(
    client: Client, engine: FakeEngine, faults: Faults
) -> None:
    engine.faults = faults
    with pytest.raises(openai.APIError, match="cannot be trained on"):
        async for _ in await client.chat.completions.create(**HELLO, stream=True):
            pass


async def test_the_engines_refusal_is_passed_on(client: Client) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await ask(client, model="nope")


async def test_a_client_that_leaves_frees_the_engine(client: Client, engine: FakeEngine) -> None:
    engine.faults = Faults(token_delay_s=0.05)
    asking = asyncio.create_task(ask(client))
    await until(lambda: engine.in_flight == 1, "the call to reach the engine")
    asking.cancel()
    await until(lambda: engine.disconnects == 1, "the engine to be freed")


async def test_it_needs_the_control_key_and_a_trajectorys_own_is_not_enough(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        headers = {"Authorization": f"Bearer {CONTROL}"}
        async with aiohttp.ClientSession(url, headers=headers) as http:
            opened = await (await http.post("/init_trajectory", json={})).json()
        for key in ("wrong", opened["api_key"]):
            async with client_of(url, key) as stranger:
                with pytest.raises(openai.AuthenticationError, match="control key"):
                    await ask(stranger)
        async with client_of(url, CONTROL) as client:
            assert (await ask(client))["choices"][0]["token_ids"]


@pytest.fixture
async def plain(pool: LocalPool, tiny_model: Path) -> AsyncIterator[tuple[Client, FakeEngine]]:
    """A gateway before a plain OpenAI server, and a tokenizer."""
    async with FakeEngine(plain=True) as engine:
        gateway = serve_gateway(pool, [engine.url], load_tokenizer=lambda _: load_tokenizer(str(tiny_model)))
        async with gateway as url, client_of(url) as client, aiohttp.ClientSession(url) as http:
            async with asyncio.timeout(20):
                while (await http.get("/ready")).status != 200:
                    await asyncio.sleep(0.02)
            yield client, engine


async def test_text_of_a_plain_server_is_encoded_again_and_told_as_such(plain: tuple[Client, FakeEngine]) -> None:
    client, engine = plain
    engine.replies.append(Reply("Hi there"))
    answer = await ask(client)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == PROMPT_IDS
    assert choice["token_ids"] == [*encode("Hi there"), END_OF_TURN]
    assert len(logprobs_of(choice)) == len(choice["token_ids"])
    assert choice["exactness"] == "retokenized"


async def test_what_cannot_be_encoded_again_is_answered_without_ids(plain: tuple[Client, FakeEngine]) -> None:
    client, engine = plain
    engine.replies.append(Reply(tool_calls=(ToolCall("add", {"a": 1}),)))
    (choice,) = (await ask(client, tools=[TOOL], max_tokens=64))["choices"]
    assert choice["message"]["tool_calls"]
    assert (choice["token_ids"], choice["exactness"]) == (None, "retokenized")
