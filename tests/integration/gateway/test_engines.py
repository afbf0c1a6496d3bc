"""The engines as the gateway sees them, against real servers that fail, pause, start late, come and go."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest

from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.gateway import fleet
from stepwell.gateway.engines import Engines
from stepwell.gateway.probing import Capabilities
from stepwell.gateway.replica import EngineState
from stepwell.gateway.reply import EngineAnswer, EngineReply
from stepwell.wire.generate import Generated
from tests.rig.fake_engine import FakeEngine, Faults
from tests.rig.gateways import free_port
from tests.rig.waiting import until

CHAT = "/v1/chat/completions"
ASKED = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})
LONG = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, "ignore_eos": True}
LONG_STREAM = orjson.dumps(LONG | {"stream": True})


def asked(_: Capabilities) -> bytes:
    return ASKED


def long_stream(_: Capabilities) -> bytes:
    return LONG_STREAM


@asynccontextmanager
async def watched(*fakes: FakeEngine, **options: Any) -> AsyncIterator[Engines]:
    """The engines of those servers, watched."""
    async with Engines([fake.url for fake in fakes], **options) as engines:
        watch = asyncio.create_task(engines.watch())
        yield engines
        watch.cancel()


@pytest.fixture
async def two() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    async with FakeEngine() as first, FakeEngine() as second:
        yield first, second


async def call(engines: Engines, sticky: str = "") -> tuple[int, str]:
    """One chat: the status, and the address of the engine that answered."""
    reply = await engines.send(CHAT, asked, sticky=sticky)
    await reply.read()
    return reply.status, reply.engine.address


async def addresses(engines: Engines, count: int) -> list[str]:
    return [(await call(engines))[1] for _ in range(count)]


def states(engines: Engines) -> list[str]:
    return [str(view.state) for view in engines.states()]


def generations(fake: FakeEngine) -> int:
    return fake.asked[CHAT]


# --- one answer


async def test_an_answer_comes_whole(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, asked)
        assert (reply.status, reply.content_type) == (200, "application/json")
        assert reply.engine.in_flight == 1
        assert orjson.loads(await reply.read())["object"] == "chat.completion"
        assert reply.engine.in_flight == 0


async def test_a_stream_comes_as_it_is_written(engine: FakeEngine) -> None:
    engine.faults = Faults(token_delay_s=0.01)
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, long_stream)
        first = await reply.next_bytes()
        assert first.startswith(b"data: ")
        assert engine.in_flight == 1, "the first bytes came with the last"
        engine.faults = Faults()
        reply.close()


async def test_a_refusal_is_the_engines_own_answer(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, lambda _: b'{"model": "another", "messages": []}')
        assert (reply.status, b"does not exist" in await reply.read()) == (404, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_reply_frees_the_engine_within_a_second(engine: FakeEngine, stream: bool) -> None:
    engine.faults = Faults(token_delay_s=0.05)
    async with watched(engine) as engines:
        if stream:
            reply = await engines.send(CHAT, long_stream)
            reply.close()
            reply.close()
            assert reply.engine.in_flight == 0
        else:
            waiting = asyncio.create_task(engines.send(CHAT, lambda _: orjson.dumps(LONG)))
            await until(lambda: engine.in_flight == 1, "the call to arrive")
            waiting.cancel()
        await until(lambda: engine.in_flight == 0, "the engine to be free", timeout=1.0)
        assert engine.disconnects == 1
        assert engines.states()[0].in_flight == 0


async def test_an_answer_that_breaks_off_says_so_and_is_not_asked_for_again(two: tuple[FakeEngine, FakeEngine]) -> None:
    for fake in two:
        fake.faults = Faults(disconnect_at_token=3, token_delay_s=0.005)
    async with watched(*two) as engines:
        reply = await engines.send(CHAT, long_stream)
        with pytest.raises(EngineUnavailable, match=f"{reply.engine.address}{CHAT} broke off"):
            while await reply.next_bytes():
                pass
        whole = await engines.send(CHAT, asked)
        with pytest.raises(EngineUnavailable, match="broke off"):
            await whole.read()
        assert [view.in_flight for view in engines.states()] == [0, 0]
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
                assert engines.states()[0].capabilities.model == "another", "it was not probed again"
    lines = [record.getMessage() for record in caplog.records if mortal.url in record.getMessage()]
    assert [line.split(" is ")[1].split(":")[0] for line in lines] == ["healthy", "down", "healthy"]


async def test_an_unhealthy_engine_gets_no_calls(
    two: tuple[FakeEngine, FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    sick, sound = two
    async with watched(*two) as engines:
        sick.health_status = 503
        await until(lambda: states(engines) == ["down", "healthy"], "the sickness to show")
        assert engines.states()[0].why == "/health answers 503"
        assert await addresses(engines, 4) == [sound.url] * 4
        asked_for = sick.asked["/health"]
        await until(lambda: sick.asked["/health"] == asked_for + 2, "two more checks")
    assert [record.getMessage() for record in caplog.records] == [f"engine {sick.url} is down: /health answers 503"]


async def test_an_engine_that_is_still_starting_is_probed_before_its_first_call() -> None:
    port = free_port()
    async with Engines([f"http://127.0.0.1:{port}"]) as engines:
        assert states(engines) == ["down"]
        with pytest.raises(EngineUnavailable, match=f"127.0.0.1:{port}: Cannot connect"):
            await call(engines)
        async with FakeEngine(port=port) as fake:
            seen: list[Capabilities] = []

            def body(capabilities: Capabilities) -> bytes:
                seen.append(capabilities)
                return ASKED

            replies = await asyncio.gather(*(engines.send(CHAT, body) for _ in range(50)))
            assert [reply.status for reply in replies] == [200] * 50
            for reply in replies:
                await reply.read()
            assert {can.model for can in seen} == {"tiny"}
            assert fake.asked["/version"] == 1, "each call probed it for itself"


# --- what an engine can do


async def test_a_probe_finds_what_vllm_can_do(engine: FakeEngine) -> None:
    async with Engines([engine.url]) as engines:
        can = engines.states()[0].capabilities
    assert can == Capabilities("0.32.0", True, True, True, True, engine.max_model_len, "tiny")
    assert engine.request_count == 0


async def test_a_plain_openai_server_is_recognised_and_watched() -> None:
    port = free_port()
    async with FakeEngine(plain=True, port=port) as fake, watched(fake) as engines:
        assert engines.states()[0].capabilities == Capabilities(model="tiny")
        assert await call(engines) == (200, fake.url)
        assert await engines.version_after((await engines.send(CHAT, asked)).engine) is None
        with pytest.raises(EngineUnavailable, match="no token ids"):
            await engines.generate([1, 2], {})
        assert states(engines) == ["healthy"]
        asked_for = fake.asked["/v1/models"]
        await until(lambda: fake.asked["/v1/models"] > asked_for, "the watch to ask for its models")


@pytest.mark.parametrize(
    ("version", "token_ids", "mode"), [("0.99.1", True, "without /inference"), ("dev", False, "as a plain OpenAI")]
)
async def test_an_unknown_version_is_a_warning_and_a_lesser_mode(
    version: str, token_ids: bool, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(version=version) as fake, watched(fake) as engines:
        can = engines.states()[0].capabilities
        assert (can.server, can.token_ids, can.generate) == (version, token_ids, False)
        assert (await call(engines))[0] == 200
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert mode in warnings[0]


@pytest.mark.parametrize("scale_out", [True, False])
async def test_generating_from_tokens_needs_no_open_generate_route(scale_out: bool) -> None:
    async with FakeEngine(scale_out=scale_out) as fake, Engines([fake.url]) as engines:
        fake.faults = Faults(version_change_at_token=2, new_version="8")
        fake.weight_version = "7"
        generated = await engines.generate([1, 2, 3], {"max_tokens": 5, "ignore_eos": True})
        assert isinstance(generated, Generated)
        assert (len(generated.sampled.response_ids), generated.usage.completion_tokens) == (5, 5)
        assert generated.version_spans == (((7, 0, 2), (8, 2, 5)) if scale_out else ())
        refused = await engines.generate([1, 2, 3], {"max_tokens": 100_000})
        assert isinstance(refused, EngineAnswer)
        assert refused.status == 400


# --- which engine


async def test_engines_take_turns(two: tuple[FakeEngine, FakeEngine]) -> None:
    first, second = (fake.url for fake in two)
    async with watched(*two) as engines:
        assert await addresses(engines, 4) == [first, second, first, second]


async def test_the_least_busy_engine_is_chosen(two: tuple[FakeEngine, FakeEngine]) -> None:
    async with watched(*two, routing="least_busy") as engines:
        busy = await engines.send(CHAT, long_stream)
        idle = {fake.url for fake in two} - {busy.engine.address}
        assert set(await addresses(engines, 4)) == idle
        busy.close()


async def test_a_trajectory_stays_on_its_engine(two: tuple[FakeEngine, FakeEngine]) -> None:
    async with watched(*two, routing="sticky") as engines:
        homes = {f"t{i}": {(await call(engines, sticky=f"t{i}"))[1] for _ in range(3)} for i in range(16)}
    assert {len(found) for found in homes.values()} == {1}
    assert len(set.union(*homes.values())) == 2


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(BadRequest, match="random"):
        Engines(["http://127.0.0.1:1"], routing="random")


async def test_engines_come_and_go_under_load(two: tuple[FakeEngine, FakeEngine]) -> None:
    first, second = two
    for fake in two:
        fake.faults = Faults(token_delay_s=0.002)
    async with watched(first) as engines:
        stop = asyncio.Event()

        async def keep_calling() -> set[int]:
            found = set()
            while not stop.is_set():
                found.add((await call(engines))[0])
            return found

        callers = [asyncio.create_task(keep_calling()) for _ in range(20)]
        await until(lambda: generations(first) > 20, "the load")
        await engines.add(second.url + "/")
        await engines.add(second.url)
        await until(lambda: generations(second) > 20, "the new engine to get calls")
        await engines.remove(first.url)
        served = generations(second)
        await until(lambda: generations(second) > served + 40, "each caller's next call")
        await until(lambda: first.in_flight == 0, "the old engine's last calls to end")
        arrived, served = generations(first), generations(second)
        await until(lambda: generations(second) > served + 40, "the calls to go on")
        assert generations(first) == arrived
        stop.set()
        assert set.union(*await asyncio.gather(*callers)) == {200}
        assert [view.address for view in engines.states()] == [second.url]


async def test_a_call_in_flight_on_a_removed_engine_comes_to_its_end(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, long_stream)
        await engines.remove(engine.url)
        with pytest.raises(EngineUnavailable, match="there is none"):
            await call(engines)
        received = b""
        while data := await reply.next_bytes():
            received += data
        assert received.endswith(b"data: [DONE]\n\n")
        engine.weight_version = "4"
        assert await engines.version_after(reply.engine) == 4


async def test_what_is_no_engine_is_neither_added_nor_removed(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        with pytest.raises(BadRequest, match="no address"):
            await engines.add("10.0.0.7:8000")
        with pytest.raises(BadRequest, match="no engine http://10.0.0.7:8000"):
            await engines.remove("http://10.0.0.7:8000")


# --- weight updates


async def test_while_one_engine_is_paused_the_other_gets_the_calls(two: tuple[FakeEngine, FakeEngine]) -> None:
    paused, free = two
    async with watched(*two) as engines:
        paused.pause()
        await until(lambda: states(engines) == ["paused", "healthy"], "the pause to show")
        assert await addresses(engines, 4) == [free.url] * 4
        paused.resume()
        await until(lambda: states(engines) == ["healthy", "healthy"], "the pause to end")
        assert set(await addresses(engines, 4)) == {paused.url, free.url}


async def test_while_all_engines_are_paused_calls_wait_and_then_spread(two: tuple[FakeEngine, FakeEngine]) -> None:
    async with watched(*two) as engines:
        for fake in two:
            fake.pause()
        await until(lambda: states(engines) == ["paused", "paused"], "the pauses to show")
        held = [asyncio.create_task(call(engines)) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in held)
        assert [generations(fake) for fake in two] == [0, 0], "a paused engine got a call"
        for fake in two:
            fake.resume()
        answers = await asyncio.gather(*held)
        assert {status for status, _ in answers} == {200}
        assert [generations(fake) for fake in two] == [10, 10], "all that waited fell on the first to resume"


async def test_a_call_waits_for_its_only_engine(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        engine.pause("abort")
        await until(lambda: states(engines) == ["paused"], "the pause to show")
        held = asyncio.create_task(engines.send(CHAT, asked))
        await asyncio.sleep(0.2)
        assert generations(engine) == 0
        engine.weight_version = "5"
        engine.resume()
        reply = await held
        assert (reply.status, reply.version_before) == (200, 5)
        await reply.read()


async def test_an_engine_that_loads_weights_is_deaf_but_not_down(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.gateway.engines.ANSWER_TIMEOUT", 0.1)
    async with watched(engine) as engines:
        engine.listens.clear()
        asked_for = engine.asked["/is_paused"]
        await until(lambda: engine.asked["/is_paused"] == asked_for + 2, "two checks without an answer")
        assert states(engines) == ["healthy"]
        assert (await call(engines))[0] == 200
        engine.listens.set()
        engine.pause()
        await until(lambda: states(engines) == ["paused"], "the pause to show")
        engine.listens.clear()
        held = asyncio.create_task(call(engines))
        asked_for = engine.asked["/is_paused"]
        await until(lambda: engine.asked["/is_paused"] == asked_for + 3, "three checks without an answer")
        assert states(engines) == ["paused"]
        assert not held.done()
        engine.listens.set()
        engine.resume()
        assert (await held)[0] == 200


async def test_a_wait_for_paused_engines_is_bounded_and_says_for_whom(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "HOLD_TIMEOUT", 0.1)
    engine.pause()
    async with watched(engine) as engines:
        assert states(engines) == ["paused"]
        with pytest.raises(EngineUnavailable, match=f"waited 0.1 s for a paused engine to resume: {engine.url}"):
            await call(engines)


async def test_the_version_is_told_by_a_question_asked_afterwards(engine: FakeEngine) -> None:
    async with Engines([engine.url]) as engines:
        reply: EngineReply = await engines.send(CHAT, asked)
        await reply.read()
        assert (reply.version_before, reply.engine.weight_version) == (None, "default")
        engine.weight_version = "7"
        before = time.monotonic()
        assert await engines.version_after(reply.engine) == 7
        assert reply.engine.version_checked_at >= before
        assert engines.states()[0].weight_version == "7"


async def test_many_who_ask_for_the_version_share_a_question(engine: FakeEngine) -> None:
    async with Engines([engine.url]) as engines:
        engine.weight_version = "3"
        reply = await engines.send(CHAT, asked)
        await reply.read()
        so_far = engine.asked["/weight_info"]
        first = [asyncio.create_task(engines.version_after(reply.engine)) for _ in range(500)]
        await until(lambda: engine.asked["/weight_info"] == so_far + 1, "the first question")
        later = [asyncio.create_task(engines.version_after(reply.engine)) for _ in range(500)]
        assert set(await asyncio.gather(*first, *later)) == {3}
        assert engine.asked["/weight_info"] <= so_far + 3


async def test_a_version_that_cannot_be_told_is_none(engine: FakeEngine) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(FakeEngine())
        async with Engines([mortal.url]) as engines:
            mortal.weight_version = "3"
            reply = await engines.send(CHAT, asked)
            await reply.read()
            assert await engines.version_after(reply.engine) == 3
            await stack.aclose()
            assert await engines.version_after(reply.engine) is None


async def test_the_models_are_those_of_an_engine(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        answer = await engines.models()
    assert (answer.status, orjson.loads(answer.body)["data"][0]["id"]) == (200, "tiny")


async def test_states_show_each_engine(two: tuple[FakeEngine, FakeEngine]) -> None:
    two[1].weight_version = "12"
    async with watched(*two) as engines:
        reply = await engines.send(CHAT, long_stream)
        first, second = engines.states()
        assert (first.address, first.state, first.why, first.in_flight) == (two[0].url, EngineState.HEALTHY, "", 1)
        assert (second.weight_version, second.in_flight) == ("12", 0)
        reply.close()
