"""A dialect is one class and one row: a third one, made here, serves agents beside chat and completions."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from stepwell.gateway.dialects.openai import ChatDialect
from stepwell.gateway.error_responses import ErrorDetails

from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of
from rig.vocabulary import END_OF_TURN, encode
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.dialect import Dialect, DialectContext, ModelCall, TokenCounter
from stepwell.gateway.dialects.openai_choices import ChoicesReply
from stepwell.steps.step import Exactness, Step
from stepwell.wire.openai import Usage

UNSPEAKABLE = "a word that the dialect below fails on"


@dataclass(slots=True)
class TelegramStream:
    """Lines of JSON: {"word"}, {"end"} or {"wrong"}."""

    media_type: str = "application/jsonl"
    said: list[str] = field(default_factory=list)

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        assert "token_ids" not in str(chunk), "nobody asked for ids"
        words = [piece["delta"].get("content") or "" for piece in chunk["choices"]]
        self.said += words
        return b"".join(line({"word": word}) for word in words if word)

    def finish(self, usage: Usage) -> bytes:
        return line({"end": "".join(self.said)})

    def fail(self, error: bytes) -> bytes:
        return error + b"\n"

    def keep_alive(self) -> bytes:
        return b"\n"


class TelegramDialect(Dialect):
    name = "telegram"
    paths: tuple[str, ...] = ("telegrams", "wires")
    summary = "Telegram"
    description = "A short text."
    unrecorded_description = "The same, unrecorded."
    request_schema: Mapping[str, Any] = {"type": "object", "properties": {"say": {"type": "string"}}}

    token_counter: TokenCounter | None = None

    def read(self, raw: bytes, around: DialectContext) -> ModelCall:
        asked = json.loads(raw)
        messages = [{"role": "user", "content": asked["say"]}]
        chat = {"model": "tiny", "messages": messages, "stream": asked.get("live", False)}
        call = ChatDialect().read(json.dumps(chat).encode(), around)
        return ModelCall(
            dialect=self,
            upstream=call.upstream,
            request=call.request,
            sampling=call.sampling,
            stream=call.stream,
            choices_per_prompt=1,
            wants=call.wants,
        )

    def reply(self, call: ModelCall, answer: ChoicesReply) -> bytes:
        (choice,) = answer.message["choices"]
        if call.request["messages"][0]["content"] == UNSPEAKABLE:
            raise ZeroDivisionError
        return json.dumps({"said": choice["message"]["content"]}).encode()

    def stream(self, call: ModelCall) -> TelegramStream:
        return TelegramStream()

    def error(self, error: ErrorDetails) -> bytes:
        return json.dumps({"wrong": error.message, "why": error.code}).encode()


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


@pytest.fixture
async def agent(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    dialects = (*DIALECTS, TelegramDialect())
    async with serve_gateway(pool, [engine.url], dialects=dialects) as url, agent_of(url) as agent:
        yield agent


async def send(agent: Agent, path: str, **asked: Any) -> tuple[int, str, list[Any]]:
    """Status, media type and lines of the answer."""
    async with agent.http.post(path, json=asked) as answer:
        text = await answer.text()
        return answer.status, answer.content_type, [json.loads(one) for one in text.splitlines() if one]


def check_exact(step: Step, text: str) -> None:
    assert (step.exactness, step.quarantine, step.untrainable) == (Exactness.ENGINE, None, None)
    assert step.response_ids.tolist() == [*encode(text), END_OF_TURN]
    assert step.response_logprobs is not None
    assert len(step.response_logprobs) == len(step.response_ids)
    assert (step.finish_reason, step.model, step.sampling["max_tokens"]) == ("stop", "tiny", 64)


async def test_its_calls_are_recorded_as_exact_steps_beside_the_others(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.replies.extend([Reply("all well"), Reply("stop"), Reply("so long")])
    whole = await send(agent, f"{agent.path}/v1/telegrams", say="how are you?")
    assert whole == (200, "application/json", [{"said": "all well"}])
    status, media_type, lines = await send(agent, f"{agent.path}/wires", say="and now?", live=True)
    assert (status, media_type) == (200, "application/jsonl")
    assert lines == [*({"word": letter} for letter in "stop"), {"end": "stop"}]
    assert (await agent.ask()).text == "so long"
    assert await agent.metric('stepwell_calls_total{kind="telegram",status="200"}') == 2
    await agent.complete()
    steps = pool.taken()
    for step, text in zip(steps, ("all well", "stop", "so long"), strict=True):
        if text != "so long":
            check_exact(step, text)
    assert len(steps) == 3


@pytest.mark.parametrize("live", [False, True])
async def test_an_answer_that_an_engine_broke_off_is_carried_on_in_its_own_form(
    agent: Agent, pool: LocalPool, engine: FakeEngine, live: bool
) -> None:
    engine.faults = Faults(abort_at_token=3, times=1)
    engine.replies.extend([Reply("all well"), Reply(" well")])
    _, _, lines = await send(agent, f"{agent.path}/telegrams", say="how are you?", live=live)
    assert lines[-1] == ({"end": "all well"} if live else {"said": "all well"})
    await agent.complete()
    (step,) = pool.taken()
    check_exact(step, "all well")


async def test_its_errors_have_its_own_form_wherever_they_come_from(agent: Agent, engine: FakeEngine) -> None:
    engine.faults = Faults(disconnect_at_token=2)
    status, _, lines = await send(agent, f"{agent.path}/telegrams", say="how?", live=True)
    assert (status, lines[-1]["why"]) == (200, "engine_unavailable")
    engine.faults = Faults(error_at_token=2)
    _, _, lines = await send(agent, f"{agent.path}/telegrams", say="how?", live=True)
    assert (lines[-1]["wrong"], lines[-1]["why"]) == ("Internal server error", "engine_unavailable")
    engine.faults = Faults(error_status=400)
    status, _, lines = await send(agent, f"{agent.path}/telegrams", say="how?")
    assert (status, lines[0]["wrong"]) == (400, "the fake engine was told to fail")
    engine.faults = Faults()
    status, _, lines = await send(agent, "/no/one/telegrams", say="how?")
    assert (status, lines[0]["why"]) == (404, "unknown_trajectory")


@pytest.mark.parametrize(("asked", "failure"), [({}, "KeyError"), ({"say": UNSPEAKABLE}, "ZeroDivisionError")])
async def test_an_unforeseen_failure_is_an_error_in_its_own_form_and_in_the_log(
    agent: Agent, caplog: pytest.LogCaptureFixture, asked: dict[str, str], failure: str
) -> None:
    """The dialect fails while it reads one request, and while it answers the other."""
    status, media_type, (told,) = await send(agent, f"{agent.path}/telegrams", **asked)
    assert (status, media_type) == (500, "application/json")
    assert told == {"wrong": f"the gateway failed ({failure}); its log says more", "why": "internal_error"}
    assert "Traceback (most recent call last)" in caplog.text


async def test_it_is_served_unrecorded_at_the_root_and_is_in_the_document(agent: Agent, engine: FakeEngine) -> None:
    engine.replies.extend([Reply("all well"), Reply("stop")])
    assert await send(agent, "/unrecorded/v1/telegrams", say="how?") == (
        200,
        "application/json",
        [{"said": "all well"}],
    )
    status, media_type, lines = await send(agent, "/unrecorded/v1/telegrams", say="how?", live=True)
    assert (status, media_type, lines[-1]) == (200, "application/jsonl", {"end": "stop"})
    async with agent.http.get("/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    assert paths["/{trajectory_uid}/{prompt_uid}/v1/telegrams"]["post"]["summary"] == "Telegram"
    assert "say" in str(paths["/unrecorded/v1/wires"]["post"]["requestBody"])


async def test_its_path_needs_the_trajectorys_key(pool: LocalPool, engine: FakeEngine) -> None:
    dialects, keys = (*DIALECTS, TelegramDialect()), ["control-key-of-the-tests"]
    async with (
        serve_gateway(pool, [engine.url], control_keys=keys, dialects=dialects) as url,
        agent_of(url, control_key=keys[0]) as agent,
        aiohttp.ClientSession(url) as stranger,
    ):
        own = {"Authorization": f"Bearer {agent.client.api_key}"}
        async with stranger.post(f"{agent.path}/telegrams", json={"say": "hi"}) as refused:
            assert (refused.status, (await refused.json())["why"]) == (401, "forbidden")
        async with stranger.post(f"{agent.path}/telegrams", json={"say": "hi"}, headers=own) as answer:
            assert answer.status == 200
