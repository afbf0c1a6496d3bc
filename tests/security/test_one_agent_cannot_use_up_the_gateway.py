"""S6, S7: what a gateway accepts from one agent, and from a client without a key."""

import asyncio
import contextlib
import gc
import time
from functools import partial
from io import BytesIO
from typing import Any
from weakref import WeakSet

import openai
import pytest
from stepwell.common.user_input import MOST_CONTAINERS, check_containers
from stepwell.gateway.requests import CallQuota, CallQuotas

from rig.fake_engine import FakeEngine
from rig.fake_engine.faults import Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import agent_of
from rig.waiting import until
from stepwell.access.access_keys import AccessKeys, _derived_key
from stepwell.common import bounded_http
from stepwell.common.bounded_http import MOST_HEADER_BYTES, MOST_HEADERS, BoundedHttp
from stepwell.errors import BadRequest, Overloaded, TooLarge
from stepwell.gateway import agent_calls
from stepwell.gateway import response_writer as deduplication


def test_a_body_of_many_small_lists_is_refused_before_it_is_parsed() -> None:
    check_containers(b"[" + b"[]," * (MOST_CONTAINERS - 2) + b"[]]")
    with pytest.raises(TooLarge, match="more than 250000 objects and lists"):
        check_containers(b"[" + b"[]," * MOST_CONTAINERS + b"[]]")
    with pytest.raises(TooLarge):
        check_containers(b'{"a\\"{": [' + b'{"b": {}},' * MOST_CONTAINERS + b"0]}")


def test_brackets_in_a_text_do_not_count_unless_the_body_is_very_large() -> None:
    text = b'int f() { return a[0]; } \\" '
    check_containers(b'{"content": "' + text * (MOST_CONTAINERS - 10) + b'"}', most=MOST_CONTAINERS // 4)
    with pytest.raises(TooLarge):
        check_containers(b'{"content": "' + text * MOST_CONTAINERS * 2 + b'"}')


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
async def test_such_a_body_costs_the_gateway_nothing_but_a_refusal(
    pool: LocalPool, engine: FakeEngine, path: str
) -> None:
    body = b'{"messages": [' + b"[]," * (2 * MOST_CONTAINERS) + b"[]]}"
    async with (
        serve_gateway(pool, [engine.url]) as url,
        agent_of(url) as agent,
        agent.http.post(
            f"{agent.path}/v1/{path}", data=BytesIO(body), headers={"Content-Type": "application/json"}
        ) as answer,
    ):
        assert answer.status == 413


@pytest.mark.parametrize("path", ["/init_trajectory", "/submit_steps", "/compute_reward"])
async def test_a_body_of_an_operators_call_is_no_larger_in_memory(
    pool: LocalPool, engine: FakeEngine, path: str
) -> None:
    body = b'{"metadata": {"a": [' + b"[]," * MOST_CONTAINERS + b"[]]}}"
    async with (
        serve_gateway(pool, [engine.url]) as url,
        agent_of(url) as agent,
        agent.http.post(path, data=BytesIO(body), headers={"Content-Type": "application/json"}) as answer,
    ):
        assert answer.status == 413
        assert "more than 250000 objects and lists" in await answer.text()


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    _, _, address = url.partition("//")
    host, _, port = address.partition(":")
    return await asyncio.open_connection(host, int(port))


def call_of(path: str, size: int) -> bytes:
    lines = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {size}")
    return "\r\n".join((f"POST {path}/v1/chat/completions HTTP/1.1", *lines, "\r\n")).encode()


async def read_to_end(url: str, *parts: bytes, pause: float = 0.0) -> bytes:
    """What a server sends until it closes the connection."""
    reader, writer = await connected(url)
    try:
        async with asyncio.timeout(60):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("line", [b"X-More: x\r\n", b"x"])
async def test_headers_without_an_end_are_cut_off(pool: LocalPool, engine: FakeEngine, line: bytes) -> None:
    part = line * (16_384 // len(line))
    sent = [b"POST / HTTP/1.1\r\nX-First: ", *[part] * (4 * MOST_HEADER_BYTES // len(part))]
    async with serve_gateway(pool, [engine.url]) as url:
        answer = await read_to_end(url, *sent, pause=0.001)
    assert answer == b"" or b" 431 " in answer or b" 400 " in answer


async def test_many_short_headers_are_refused_before_they_end_and_not_at_once(
    pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "late_seconds", 0.5)
    more = b"X-More: x\r\n"
    headers = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + more * (MOST_HEADERS - 2)
    async with serve_gateway(pool, [engine.url]) as url:
        assert b" 200 " in await read_to_end(url, headers + b"\r\n")
        began = time.monotonic()
        answer = await read_to_end(url, headers + 2 * more)
    assert b" 431 " in answer
    assert answer.endswith(b"a request has at most 256 headers, of 64 KiB together")
    assert time.monotonic() - began >= 0.5


async def test_the_bodies_of_refused_calls_are_read_slowly(
    pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "UNWANTED_BYTES_A_SECOND", 2**20)
    sent = 0
    async with serve_gateway(pool, [engine.url], quota=CallQuota(bytes=1_000)) as url, agent_of(url) as agent:
        _, writer = await connected(url)
        writer.write(call_of(agent.path, 60 * 2**20))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                while sent < 60:
                    writer.write(b" " * 2**20)
                    await writer.drain()
                    sent += 1
        writer.transport.abort()
    assert sent < 40


async def test_a_client_that_sends_all_before_it_reads_gets_its_refusal_and_its_connection_goes_on(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url], quota=CallQuota(bytes=1_000)) as url, agent_of(url) as agent:
        reader, writer = await connected(url)
        for _ in range(3):
            writer.write(call_of(agent.path, 2 * 2**20) + b" " * (2 * 2**20))
            await writer.drain()
            async with asyncio.timeout(30):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert b"quota bytes=1000 is used up" in await reader.readexactly(length)
        writer.close()


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /init_traj",
        b"POST /init_trajectory HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /init_trajectory HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half the headers", "half a body"],
)
async def test_a_client_that_does_not_go_on_is_disconnected(
    pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(BoundedHttp, "header_seconds", 0.3)
    monkeypatch.setattr(BoundedHttp, "silent_seconds", 0.3)
    async with serve_gateway(pool, [engine.url]) as url:
        began = time.monotonic()
        await read_to_end(url, begun)
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("path", ["/health", f"/{'n' * 50_000}/p/v1/chat/completions"])
async def test_a_connection_that_has_ended_leaves_nothing_for_the_garbage_collector(
    pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """That one comes seldom, and a connection has its last request."""
    connections = WeakSet[BoundedHttp]()
    made = BoundedHttp.connection_made

    def connection_made(self: BoundedHttp, transport: asyncio.Transport) -> None:
        connections.add(self)
        made(self, transport)

    monkeypatch.setattr(BoundedHttp, "connection_made", connection_made)
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    async with serve_gateway(pool, [engine.url]) as url:
        await read_to_end(url, request)
        gc.disable()
        try:
            for _ in range(5):
                assert await read_to_end(url, request)
            await until(lambda: len(connections) <= 1, "the connections to be gone", timeout=10)
        finally:
            gc.enable()


async def test_an_answer_that_takes_long_is_not_cut_off(
    pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "header_seconds", 0.1)
    monkeypatch.setattr(BoundedHttp, "silent_seconds", 0.1)
    engine.faults = Faults(token_delay_s=0.05)
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        assert (await agent.ask(extra_body={"ignore_eos": True})).finish_reason == "length"


async def test_one_agents_calls_in_flight_do_not_refuse_anothers(pool: LocalPool, engine: FakeEngine) -> None:
    engine.faults = Faults(token_delay_s=0.05)
    quota = CallQuota(in_flight=2)
    async with (
        serve_gateway(pool, [engine.url], quota=quota) as url,
        agent_of(url) as greedy,
        agent_of(url) as honest,
    ):
        waiting = [asyncio.create_task(greedy.ask(messages=[user(str(n))])) for n in range(2)]
        await until(lambda: engine.in_flight == 2, "two calls")
        with pytest.raises(openai.APIStatusError, match="quota in_flight=2 is used up"):
            await greedy.client.with_options(max_retries=0).chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "third"}]
            )
        await honest.ask()
        await asyncio.gather(*waiting)
        await greedy.ask()
        assert await honest.metric('stepwell_quota_refused_total{quota="in_flight"}') == 1


async def test_the_answers_that_are_kept_for_one_agents_keys_are_bounded(
    pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = partial(deduplication.RequestDeduplicator, kept_of_a_caller=20_000)
    monkeypatch.setattr(agent_calls, "RequestDeduplicator", bounded)
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as greedy, agent_of(url) as honest:
        refused, text = await greedy.say(headers={"Idempotency-Key": "k" * 8_000})
        assert (refused, "at most 255 bytes" in text) == (400, True)
        await honest.say(headers={"Idempotency-Key": "mine"})
        for n in range(20):
            await greedy.say(headers={"Idempotency-Key": f"{n:0255}"})
        called = len(engine.requests)
        await honest.say(headers={"Idempotency-Key": "mine"})
        assert len(engine.requests) == called, "the honest agent's answer was kept"
        dropped = await honest.metric('stepwell_kept_answers_dropped_total{cause="caller"}')
        assert dropped is not None
        assert 20 - 20_000 // deduplication.AN_ANSWER <= dropped < 20


def test_long_names_are_not_remembered() -> None:
    keys = AccessKeys(["control-key-of-this-test"])
    before = _derived_key.cache_info().currsize
    for n in range(100):
        assert not keys.may_call(b"Bearer x", "t" * 60_000 + str(n), "p")
    assert _derived_key.cache_info().currsize == before
    own = keys.trajectory_key("t" * 128, "p" * 128)
    assert keys.may_call(f"Bearer {own}", "t" * 128, "p" * 128)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_paid_for_by_time() -> None:
    clock = Clock()
    quotas = CallQuotas(CallQuota(per_second=1, tokens_per_second=2), clock)
    for _ in range(10):
        with quotas.call_of("a", 0):
            pass
    with pytest.raises(Overloaded, match="per_second=1"):
        quotas.call_of("a", 0)
    clock.now += 1
    with quotas.call_of("a", 0) as call:
        call.use(30)
    clock.now += 4
    with pytest.raises(Overloaded, match="tokens_per_second=2"):
        quotas.call_of("a", 0)
    with quotas.call_of("b", 0):
        pass
    clock.now += 1
    with quotas.call_of("a", 0):
        pass
    assert quotas.refused == {"per_second": 1, "tokens_per_second": 1}


def test_bodies_count_while_their_calls_are_in_flight() -> None:
    quotas = CallQuotas(CallQuota(bytes=100))
    with quotas.call_of("a", 60) as call:
        with pytest.raises(Overloaded, match="bytes=100"):
            quotas.call_of("a", 50)
        call.grow(40)
        with pytest.raises(Overloaded):
            call.grow(1)
        with quotas.call_of("b", 100), quotas.call_of("", 1_000):
            assert quotas.bytes == 1_200
    assert quotas.bytes == 0
    with quotas.call_of("a", 100):
        pass


def test_many_callers_are_forgotten_but_none_with_a_call_in_flight() -> None:
    quotas = CallQuotas(CallQuota(in_flight=1))
    with quotas.call_of("busy", 0):
        for n in range(11_000):
            with quotas.call_of(str(n), 0):
                pass
        with pytest.raises(Overloaded):
            quotas.call_of("busy", 0)


def test_a_quota_is_read_from_its_name_and_number() -> None:
    assert CallQuota.read(("in_flight=3", "per_second=0.5")) == CallQuota(in_flight=3, per_second=0.5)
    with pytest.raises(BadRequest, match="no quota is called 'calls'; there are in_flight"):
        CallQuota.read(("calls=3",))
    with pytest.raises(BadRequest, match="needs a number"):
        CallQuota.read(("in_flight=x",))
