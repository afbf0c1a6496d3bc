"""A dialect whose URL has the model, with a query and a key header of its own, is one folder: this one."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from stepwell.gateway.asgi import access_table

from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of
from rig.vocabulary import END_OF_TURN, encode
from stepwell.gateway.dialects import DIALECTS
from stepwell.steps.step import Exactness
from tests.integration.gateway.model_in_url.content_dialect import ContentDialect

CONTROL = "control-key-of-the-tests"
DIALECTS_WITH_CONTENT = (*DIALECTS, ContentDialect())
WHOLE, STREAMED = ":generateContent", ":streamGenerateContent?alt=sse"


@dataclass(frozen=True, slots=True)
class ContentClient:
    """A client that knows the address and the key of one trajectory, and has no other header."""

    http: aiohttp.ClientSession
    root: str
    key: str

    async def ask(self, verb: str, text: str = "hello", *, model: str = "tiny", **headers: str) -> tuple[int, str, Any]:
        """Status, media type, and the answer, or the list of the events of a stream."""
        asked = {"contents": [{"role": "user", "parts": [{"text": text}]}]}
        with_key = {"x-goog-api-key": self.key, **headers}
        path = f"{self.root}/v1beta/models/{model}{verb}"
        async with self.http.post(path, json=asked, headers={k: v for k, v in with_key.items() if v}) as answer:
            said = await answer.text()
            if answer.content_type != "text/event-stream":
                return answer.status, answer.content_type, json.loads(said)
            events = [json.loads(line.removeprefix("data: ")) for line in said.split("\n\n") if line]
            return answer.status, answer.content_type, events


@pytest.fixture
async def agent(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    engine.adapters |= {"big", "some/model"}
    more = {"control_keys": [CONTROL], "dialects": DIALECTS_WITH_CONTENT, "other_models": ["big", "some/model"]}
    async with serve_gateway(pool, [engine.url], **more) as url, agent_of(url, control_key=CONTROL) as agent:  # type: ignore[arg-type]
        yield agent


@pytest.fixture
async def client(agent: Agent) -> AsyncIterator[ContentClient]:
    async with aiohttp.ClientSession(agent.http._base_url) as http:
        yield ContentClient(http, agent.path, str(agent.client.api_key))


def text_of(answer: Any) -> str:
    return "".join(part["text"] for made in answer.get("candidates", ()) for part in made["content"]["parts"])


async def test_its_calls_are_recorded_whole_and_streamed(
    agent: Agent, client: ContentClient, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.replies.extend([Reply("all well"), Reply("so long")])
    status, media_type, answer = await client.ask(WHOLE)
    assert (status, media_type, text_of(answer)) == (200, "application/json", "all well")
    assert (answer["candidates"][0]["finishReason"], answer["modelVersion"]) == ("STOP", "tiny")
    status, media_type, events = await client.ask(STREAMED)
    assert (status, media_type, "".join(map(text_of, events))) == (200, "text/event-stream", "so long")
    assert await agent.metric('stepwell_calls_total{kind="content",status="200"}') == 2
    await agent.complete()
    steps = pool.taken()
    assert [step.response_ids.tolist() for step in steps] == [
        [*encode(text), END_OF_TURN] for text in ("all well", "so long")
    ]
    for step in steps:
        assert (step.exactness, step.quarantine, step.untrainable) == (Exactness.ENGINE, None, None)
        assert (step.model, step.sampling["max_tokens"]) == ("tiny", 64)
        assert step.response_logprobs is not None


async def test_its_key_comes_in_its_own_header(agent: Agent, client: ContentClient) -> None:
    async with agent_of(str(agent.http._base_url), control_key=CONTROL) as other:
        others_key = str(other.client.api_key)
    for key, expected in ((client.key, 200), (CONTROL, 200), (others_key, 401), ("wrong", 401), ("", 401)):
        for verb in (WHOLE, STREAMED):
            status, _, answer = await client.ask(verb, **{"x-goog-api-key": key})
            assert status == expected, (key, verb)
            if status == 401:
                assert answer["error"]["status"] == "forbidden"
    status, _, _ = await client.ask(WHOLE, **{"x-goog-api-key": "", "Authorization": f"Bearer {client.key}"})
    assert status == 200


async def test_the_model_of_the_url_counts_and_may_have_a_slash(client: ContentClient, engine: FakeEngine) -> None:
    for model in ("big", "some/model", "some%2Fmodel"):
        await client.ask(WHOLE, model=model)
    asked = [seen.body["model"] for seen in engine.requests if seen.path == "/v1/chat/completions"]
    assert asked == ["big", "some/model", "some/model"]


async def test_its_query_is_its_own(client: ContentClient) -> None:
    status, _, answer = await client.ask(":streamGenerateContent")
    assert (status, answer["error"]["message"]) == (400, "a stream needs ?alt=sse")
    status, _, answer = await client.ask(":streamGenerateContent?" + "&".join(f"a{n}=1" for n in range(101)))
    assert (status, answer["error"]["message"][:26]) == (400, "the query cannot be read: ")


async def test_the_same_body_at_two_models_is_two_calls(
    agent: Agent, client: ContentClient, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.faults = Faults(token_delay_s=0.02)
    answers = await asyncio.gather(*(client.ask(WHOLE, model=model) for model in ("tiny", "tiny", "big")))
    assert [status for status, _, _ in answers] == [200, 200, 200]
    assert [answer["modelVersion"] for _, _, answer in answers] == ["tiny", "tiny", "big"]
    await agent.complete()
    assert len(pool.taken()) == 2


async def test_a_refusal_is_in_its_own_form(client: ContentClient, engine: FakeEngine) -> None:
    engine.faults = Faults(disconnect_at_token=2)
    status, _, events = await client.ask(STREAMED)
    assert (status, events[-1]["error"]["status"]) == (200, "engine_unavailable")
    for path in ("/v1beta/models/tiny:generateContent", "/no/one/v1beta/models/tiny:generateContent"):
        async with client.http.post(path, json={}, headers={"x-goog-api-key": CONTROL}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, 404), path


@pytest.mark.parametrize("verb", [":generateContent/", ":embedContent", ":generateContent:countTokens/x", ""])
async def test_another_path_is_for_the_admin_alone(client: ContentClient, verb: str) -> None:
    async with client.http.post(
        f"{client.root}/v1beta/models/tiny{verb}", json={}, headers={"x-goog-api-key": client.key}
    ) as answer:
        assert answer.status == 403


async def test_it_is_served_unrecorded_and_its_prompts_are_counted(
    client: ContentClient, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.replies.append(Reply("all well"))
    whitebox = ContentClient(client.http, "/unrecorded/v1", CONTROL)
    assert text_of((await whitebox.ask(WHOLE))[2]) == "all well"
    status, _, counted = await client.ask(":countTokens")
    assert (status, counted["totalTokens"] > 0) == (200, True)
    assert pool.transport.messages == []


async def test_it_is_in_the_table_of_routes_and_in_the_document(agent: Agent) -> None:
    shown = "/{trajectory_uid}/{prompt_uid}/v1/v1beta/models/{model}:streamGenerateContent"
    listed = {route.path for route in access_table([ContentDialect()])}
    assert shown.replace("{model}", "{model:path}") in listed
    async with agent.http.get("/openapi.json") as answer:
        document = await answer.json()
    made = document["paths"][shown]["post"]
    assert {(one["in"], one["name"]) for one in made["parameters"]} >= {("path", "model"), ("query", "alt")}
    assert document["components"]["securitySchemes"]["x-goog-api-key"]["in"] == "header"
