"""The engines as the gateway sees them, against real servers that fail, pause, start late, come and go."""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any, cast

import orjson
import pytest

from rig import chat_templates
from rig.fake_engine import FakeEngine, Faults
from rig.fake_engine.asking import RefusedError
from rig.gateways import free_port
from rig.waiting import until
from stepwell.engines import replica
from stepwell.engines.engine import EXTRA_SAMPLING, EngineFacts, EngineHttp, Generated
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import RefusedReply
from stepwell.engines.vllm import VllmEngine
from stepwell.errors import EngineUnavailable
from tests.integration.engines.engine_calls import (
    ASKED,
    CHAT,
    LONG,
    LONG_STREAM,
    addresses,
    call,
    generations,
    states,
    watched,
)

# --- one answer


async def test_an_answer_comes_whole(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, ASKED)
        assert reply.status == 200
        assert reply.engine.in_flight == 1
        assert orjson.loads(await reply.read())["object"] == "chat.completion"
        assert reply.engine.in_flight == 0


async def test_a_stream_comes_as_it_is_written(engine: FakeEngine) -> None:
    engine.faults = Faults(token_delay_s=0.01)
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, LONG_STREAM)
        first = await reply.next_bytes()
        assert first.startswith(b"data: ")
        assert engine.in_flight == 1, "the first bytes came with the last"
        engine.faults = Faults()
        reply.close()


async def test_a_refusal_is_the_engines_own_answer(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, ASKED | {"model": "another"})
        assert (reply.status, b"does not exist" in await reply.read()) == (404, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_reply_frees_the_engine_within_a_second(engine: FakeEngine, stream: bool) -> None:
    engine.faults = Faults(token_delay_s=0.05)
    async with watched(engine) as engines:
        if stream:
            reply = await engines.send(CHAT, LONG_STREAM)
            reply.close()
            reply.close()
            assert reply.engine.in_flight == 0
        else:
            waiting = asyncio.create_task(engines.send(CHAT, LONG))
            await until(lambda: engine.in_flight == 1, "the call to arrive")
            waiting.cancel()
        await until(lambda: engine.in_flight == 0, "the engine to be free", timeout=1.0)
        assert engine.disconnects == 1
        assert engines.replicas[0].in_flight == 0


async def test_an_answer_that_breaks_off_says_so_and_is_not_asked_for_again(two: tuple[FakeEngine, FakeEngine]) -> None:
    for fake in two:
        fake.faults = Faults(disconnect_at_token=3, token_delay_s=0.005)
    async with watched(*two) as engines:
        reply = await engines.send(CHAT, LONG_STREAM)
        with pytest.raises(EngineUnavailable, match=f"{reply.engine.address}{CHAT} broke off"):
            while await reply.next_bytes():
                pass
        whole = await engines.send(CHAT, ASKED)
        with pytest.raises(EngineUnavailable, match="broke off"):
            await whole.read()
        assert [view.in_flight for view in engines.replicas] == [0, 0]
    assert [generations(fake) for fake in two] == [1, 1]


async def test_the_key_goes_to_every_engine_with_calls_and_questions(engine: FakeEngine) -> None:
    async with watched(engine, api_key="sesame") as engines:
        await call(engines)
    assert engine.requests[-1].headers["Authorization"] == "Bearer sesame"


# --- another engine, where one gives no answer


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (Faults(hang_up=True), "Server disconnected"),
        (Faults(error_status=503), "answers 503"),
        (Faults(error_status=502), "answers 502"),
    ],
)
async def test_a_call_without_an_answer_goes_to_another_engine(
    two: tuple[FakeEngine, FakeEngine], faults: Faults, why: str
) -> None:
    broken, sound = two
    broken.faults = faults
    async with watched(*two) as engines:
        assert await addresses(engines, 4) == [sound.url] * 4
        assert generations(broken) >= 1
        sound.faults = faults
        with pytest.raises(EngineUnavailable) as failed:
            await call(engines)
    assert f"{broken.url}: {why}" in str(failed.value)
    assert f"{sound.url}: {why}" in str(failed.value)


async def test_an_error_of_the_engines_own_is_passed_on(two: tuple[FakeEngine, FakeEngine]) -> None:
    two[0].faults = Faults(error_status=500)
    async with watched(*two) as engines:
        assert sorted([(await call(engines))[0] for _ in range(2)]) == [200, 500]


async def test_an_engine_that_dies_is_passed_over_and_used_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "stepwell.gateway")
    port = free_port()
    async with FakeEngine() as sound, AsyncExitStack() as dying:
        mortal = await dying.enter_async_context(FakeEngine(port=port))
        async with watched(mortal, sound) as engines:
            await dying.aclose()
            assert await addresses(engines, 3) == [sound.url] * 3
            assert states(engines) == ["down", "healthy"]
            async with FakeEngine(port=port, model="another"):
                await until(lambda: states(engines) == ["healthy", "healthy"], "the engine to be back")
                assert engines.replicas[0].facts.model == "another", "it was not probed again"
    lines = [record.getMessage() for record in caplog.records if mortal.url in record.getMessage()]
    assert [line.split(" is ")[1].split(":")[0] for line in lines] == ["healthy", "down", "healthy"]


async def test_an_unhealthy_engine_gets_no_calls(
    two: tuple[FakeEngine, FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    sick, sound = two
    async with watched(*two) as engines:
        sick.health_status = 503
        await until(lambda: states(engines) == ["down", "healthy"], "the sickness to show")
        assert engines.replicas[0].why == "/health answers 503"
        assert await addresses(engines, 4) == [sound.url] * 4
        asked_for = sick.asked["/health"]
        await until(lambda: sick.asked["/health"] == asked_for + 2, "two more checks")
    assert [record.getMessage() for record in caplog.records] == [f"engine {sick.url} is down: /health answers 503"]


async def test_an_engine_that_is_still_starting_is_probed_before_its_first_call() -> None:
    port = free_port()
    async with EngineFleet([f"http://127.0.0.1:{port}"]) as engines:
        assert states(engines) == ["down"]
        with pytest.raises(EngineUnavailable, match=f"127.0.0.1:{port}: Cannot connect"):
            await call(engines)
        async with FakeEngine(port=port) as fake:
            replies = await asyncio.gather(*(engines.send(CHAT, ASKED) for _ in range(50)))
            assert [reply.status for reply in replies] == [200] * 50
            for reply in replies:
                await reply.read()
            assert all(request.body["return_token_ids"] for request in fake.requests if request.path == CHAT.value)
            assert fake.asked["/version"] == 1, "each call probed it for itself"


# --- what an engine can do


async def test_a_probe_finds_what_vllm_can_do(engine: FakeEngine) -> None:
    async with EngineFleet([engine.url]) as engines:
        facts = engines.replicas[0].facts
    assert facts == EngineFacts(
        kind="vllm",
        server_version="0.32.0",
        label="vLLM 0.32.0",
        model="tiny",
        max_model_len=engine.max_model_len,
        token_ids=True,
        extra_sampling=frozenset(EXTRA_SAMPLING),
        generate=True,
        derender=True,
        renderer="/v1/chat/completions/render",
        renders_chat=True,
        template=facts.template,
        pause=True,
        reports_version=True,
        weight_versions=True,
        logprobs_mode="processed",
        tools=True,
    )
    assert facts.template
    assert engine.request_count == 0


async def test_an_engine_that_does_not_answer_at_first_is_asked_again_for_what_it_samples(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowToStart(VllmEngine):
        asked = 0

        async def probe_sampling(self, http: EngineHttp, facts: EngineFacts) -> EngineFacts:
            self.asked += 1
            if self.asked == 1:
                raise EngineUnavailable("no answer within 5 s")
            return await super().probe_sampling(http, facts)

    monkeypatch.setattr(replica, "SAMPLING_INTERVAL", 0.0)
    async with EngineFleet([engine.url], kinds=[SlowToStart()]) as engines:
        one = engines.replicas[0]
        assert (one.state, one.facts.logprobs_mode) == ("healthy", "")
        await one.check()
        assert one.facts.logprobs_mode == "processed"


async def test_a_busy_engine_has_not_said_which_log_probabilities_it_reports() -> None:
    class Busy:
        async def ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
            return 503, b"{}"

    with pytest.raises(EngineUnavailable, match="503"):
        await VllmEngine().probe_sampling(cast("EngineHttp", Busy()), EngineFacts(model="tiny"))


async def test_engines_share_a_template_if_they_render_alike(two: tuple[FakeEngine, FakeEngine]) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with EngineFleet([engine.url for engine in two]) as engines:
        assert engines.template
        rendered = await engines.render(asked, engines.template)
        assert rendered.tolist() == two[0].rendered(asked)
        with pytest.raises(EngineUnavailable, match="no engine renders"):
            await engines.render(asked, "another")
        async with FakeEngine(template=chat_templates.headers) as other:
            await engines.add(other.url)
            assert engines.template == ""


def only_with_tools(messages: list[Any], tools: list[Any], add_generation_prompt: bool) -> str:
    """As Hermes' template for tools."""
    if not tools:
        raise RefusedError(400, "BadRequestError", "'NoneType' object is not iterable")
    return chat_templates.chatml(messages, tools, add_generation_prompt)


async def test_a_template_that_refuses_conversations_without_tools_is_known() -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "tools": [{"type": "function"}]}
    async with FakeEngine(template=only_with_tools) as engine, EngineFleet([engine.url]) as engines:
        assert engines.template
        assert (await engines.render(asked, engines.template)).tolist() == engine.rendered(asked)


async def test_a_plain_openai_server_is_recognised_and_watched() -> None:
    port = free_port()
    async with FakeEngine(plain=True, port=port) as fake, watched(fake) as engines:
        label = "a plain OpenAI server, or one that hides its version"
        assert engines.replicas[0].facts == EngineFacts(kind="openai", label=label, model="tiny")
        assert await call(engines) == (200, fake.url)
        assert await engines.version_after((await engines.send(CHAT, ASKED)).engine) is None
        with pytest.raises(EngineUnavailable, match="no token ids"):
            await engines.generate([1, 2], {})
        assert states(engines) == ["healthy"]
        asked_for = fake.asked["/v1/models"]
        await until(lambda: fake.asked["/v1/models"] > asked_for, "the watch to ask for its models")


@pytest.mark.parametrize("scale_out", [True, False])
async def test_generating_from_tokens_needs_no_open_generate_route(scale_out: bool) -> None:
    async with FakeEngine(scale_out=scale_out) as fake, EngineFleet([fake.url]) as engines:
        fake.faults = Faults(version_change_at_token=2, new_version="8")
        fake.weight_version = "7"
        generated = await engines.generate([1, 2, 3], {"max_tokens": 5, "ignore_eos": True})
        assert isinstance(generated, Generated)
        assert (len(generated.sampled.response_ids), generated.usage.completion_tokens) == (5, 5)
        assert generated.version_spans == (((7, 0, 2), (8, 2, 5)) if scale_out else ())
        if not scale_out:
            with pytest.raises(EngineUnavailable, match="cannot tell what its tokens spell: start vLLM"):
                await engines.derender(ASKED, generated.sampled)
        refused = await engines.generate([1, 2, 3], {"max_tokens": 100_000})
        assert isinstance(refused, RefusedReply)
        assert refused.status == 400
