"""T17: what is trained are the answers that an agent read. Real sockets, and the real openai package."""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy
from stepwell.gateway.dialects.openai import ChatDialect
from stepwell.gateway.recording.call_book import CallBook
from stepwell.steps.trainable import fault_kind

from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, Agent, agent_of
from rig.waiting import until
from stepwell.common.bounded_http import BoundedHttp
from stepwell.errors import BadRequest
from stepwell.gateway.app import GatewayLimits
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import unpack

FOR_EVER = 60.0
SAME_KEY: dict[str, Any] = {"Idempotency-Key": "once"}
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
async def agent(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        yield agent


async def kinds(agent: Agent, pool: LocalPool) -> list[str]:
    """Why the steps of the trajectory are not trained, in order; empty for those that are. It is completed first."""
    assert await agent.complete(reward=1.0) == "completed"
    _, trajectory_uid, prompt_uid = agent.path.split("/")
    steps = unpack(await pool.read([(trajectory_uid, prompt_uid)]), copy=True)
    return [fault_kind(step.quarantine or step.untrainable or "") for step in steps]


def open_socket(agent: Agent, key: str = "", **wanted: Any) -> socket.socket:
    """A connection on which a call was sent, of a client that does as the test says."""
    address, body = urlsplit(str(agent.client.base_url)), json.dumps({**HELLO, **wanted}).encode()
    head = f"POST {agent.path}/v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
    head += f"Idempotency-Key: {key}\r\n" if key else ""
    connection = socket.create_connection((str(address.hostname), int(address.port or 0)))
    connection.setblocking(False)
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


async def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    async with asyncio.timeout(60):
        while end not in data:
            part = await asyncio.get_running_loop().sock_recv(connection, 65_536)
            assert part, f"the connection ended: {data!r}"
            data += part
    return data


def hang_up(connection: socket.socket) -> None:
    """With a reset, as a client does that is killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def test_an_answer_that_is_given_up_in_the_middle_is_unseen_and_the_later_one_is_trained(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.faults = Faults(silent_s=FOR_EVER, silent_at_token=5, times=1)
    engine.replies.extend([Reply("too long an answer"), Reply("four")])
    connection = open_socket(agent, stream=True)
    await read_until(connection, b"data: ")
    hang_up(connection)
    await until(lambda: engine.in_flight == 0, "the engine to be free")
    await agent.ask(stream=True)
    assert await kinds(agent, pool) == ["unseen", ""]
    assert pool.rules.stats().marked == {"unseen": 1}


async def test_the_agents_answers_that_it_read_to_their_end_are_trained_however_it_leaves(
    agent: Agent, pool: LocalPool
) -> None:
    for stream, end in ((False, b"}"), (True, b"data: [DONE]\n\n")):
        connection = open_socket(agent, stream=stream)
        await read_until(connection, end)
        hang_up(connection)
    assert await kinds(agent, pool) == ["", ""]
    assert not pool.rules.stats().marked


async def test_a_client_that_leaves_at_the_finish_reason_has_read_its_answer(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    """Many stop there and do not wait for the end of the stream."""
    for _ in range(5):
        connection = open_socket(agent, stream=True)
        await read_until(connection, b'"finish_reason":"')
        hang_up(connection)
        await until(lambda: engine.in_flight == 0, "the engine to be free")
    assert await kinds(agent, pool) == [""] * 5


async def test_a_client_gets_no_finish_reason_before_the_end_and_has_not_read_an_answer_without_it(
    agent: Agent, pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits until the pool knows of the call."""
    announced = asyncio.Event()
    with monkeypatch.context() as patched:
        patched.setattr(CallBook, "announced", lambda *_: announced.wait())
        connection = open_socket(agent, stream=True)
        await read_until(connection, b"content")
        await until(lambda: engine.in_flight == 0, "the engine to be free")
        with suppress(BlockingIOError):
            assert b'"finish_reason":"' not in connection.recv(65_536)
        hang_up(connection)
        await until(lambda: pool.rules.stats().marked == {"unseen": 1}, "the mark")
    await agent.ask(stream=True)
    assert await kinds(agent, pool) == ["unseen", ""]


@streamed_or_not
async def test_an_answer_whose_client_has_left_just_before_its_end_is_unseen(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel knows it before the event loop does."""
    with monkeypatch.context() as patched:
        patched.setattr(BoundedHttp, "is_open", lambda self: False)
        await agent.ask(stream=stream)
    await agent.ask(stream=stream)
    assert await kinds(agent, pool) == ["unseen", ""]


@streamed_or_not
async def test_what_a_repeat_with_the_same_key_reads_is_trained(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(BoundedHttp, "is_open", lambda self: False)
        await agent.ask(stream=stream, extra_headers=SAME_KEY)
    await agent.until_metric('stepwell_step_marks_total{mark="unseen"}', 1)
    await agent.ask(stream=stream, extra_headers=SAME_KEY)
    assert engine.asked["/v1/chat/completions"] == 1
    assert await kinds(agent, pool) == [""]
    assert pool.rules.stats().marked == {"unseen": 1, "read": 1}


@streamed_or_not
async def test_the_first_client_leaves_and_one_that_joined_reads_the_answer(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = Faults(token_delay_s=0.02)
    connection = open_socket(agent, stream=stream)
    await until(lambda: engine.in_flight == 1, "the call to arrive")
    second = asyncio.create_task(agent.say(stream=stream))
    await agent.until_metric('stepwell_calls_joined_total{kind="chat"}', 1)
    hang_up(connection)
    assert (await second)[0] == 200
    assert await kinds(agent, pool) == [""]


@asynccontextmanager
async def durable(pool: LocalPool, engine: FakeEngine, timeout: float) -> AsyncIterator[Agent]:
    limits = GatewayLimits(ask_timeout=30.0, confirm_timeout=timeout)
    async with serve_gateway(pool, [engine.url], is_durable=True, limits=limits) as url, agent_of(url) as agent:
        yield agent


@streamed_or_not
async def test_a_call_that_fails_after_it_was_sampled_leaves_an_unseen_step(
    pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    """--durability sync, and the pool is away: the step is kept and delivered, its agent gets an error and repeats."""
    async with durable(pool, engine, timeout=2.0) as agent:
        pool.away = True
        with pytest.raises(openai.APIError):
            await agent.ask(stream=stream)
        pool.away = False
        await agent.ask(stream=stream)
        assert await kinds(agent, pool) == ["unseen", ""]


async def test_a_fault_of_the_gateway_after_sampling_leaves_an_unseen_step(
    agent: Agent, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise BadRequest("it cannot be written")

    with monkeypatch.context() as patched:
        patched.setattr(ChatDialect, "reply", fail)
        with pytest.raises(openai.BadRequestError):
            await agent.ask()
    await agent.ask()
    assert await kinds(agent, pool) == ["unseen", ""]


async def test_only_the_answer_that_the_sdk_read_is_trained_of_those_it_asked_for_again(
    pool: LocalPool, engine: FakeEngine
) -> None:
    """Its own timeout and its own retries, without a key; the first answers are sampled and wait for the pool."""
    async with durable(pool, engine, timeout=30.0) as agent:
        client = agent.client.with_options(timeout=1.0, max_retries=20)
        (shard,) = pool.transport.services
        pool.transport.shards_stopped.add(shard)
        asking = asyncio.create_task(client.chat.completions.create(**HELLO))
        await agent.until_metric("stepwell_waiting_steps", 3)
        pool.transport.shards_stopped.clear()
        assert (await asking).choices
        found = await kinds(agent, pool)
    assert len(found) >= 3
    assert found == ["unseen"] * (len(found) - 1) + [""]


async def test_marks_wait_for_a_pool_that_is_away_and_the_completion_for_the_marks(
    agent: Agent, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(BoundedHttp, "is_open", lambda self: False)
        await agent.ask()
        pool.away = True
        await agent.ask()
    asking = asyncio.create_task(kinds(agent, pool))
    pool.away = False
    assert await asking == ["unseen", "unseen"]


async def choices(agent: Agent, count: int) -> list[dict[str, Any]]:
    status, text = await agent.say(n=count)
    assert status == 200, text
    return [{"role": "assistant", "content": one["message"]["content"]} for one in json.loads(text)["choices"]]


async def go_on(agent: Agent, reply: dict[str, Any]) -> None:
    again = [*HELLO["messages"], reply, {"role": "user", "content": "and then?"}]
    assert (await agent.say(messages=again))[0] == 200


@asynccontextmanager
async def bridged(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    async with serve_gateway(pool, [engine.url], bridge=ThinkingPolicy.TEMPLATE) as url, agent_of(url) as agent:
        yield agent


async def test_of_several_choices_the_one_that_is_continued_is_trained(pool: LocalPool, engine: FakeEngine) -> None:
    async with bridged(pool, engine) as agent:
        await go_on(agent, (await choices(agent, 4))[2])
        assert await kinds(agent, pool) == ["not_continued", "not_continued", "", "not_continued", ""]


async def test_all_choices_are_trained_if_none_is_continued(pool: LocalPool, engine: FakeEngine) -> None:
    async with bridged(pool, engine) as agent:
        await choices(agent, 4)
        assert (await agent.say())[0] == 200
        assert await kinds(agent, pool) == [""] * 5


async def test_all_choices_that_are_continued_are_trained(pool: LocalPool, engine: FakeEngine) -> None:
    async with bridged(pool, engine) as agent:
        replies = await choices(agent, 3)
        await go_on(agent, replies[1])
        await go_on(agent, replies[2])
        assert await kinds(agent, pool) == ["not_continued", "", "", "", ""]


async def test_of_choices_that_are_alike_one_is_trained(pool: LocalPool, engine: FakeEngine) -> None:
    engine.faults = Faults(ignore_seed=True)
    async with bridged(pool, engine) as agent:
        engine.replies.extend([Reply("four")] * 3)
        replies = await choices(agent, 3)
        assert len({reply["content"] for reply in replies}) == 1
        await go_on(agent, replies[1])
        assert await kinds(agent, pool) == ["", "not_continued", "not_continued", ""]


async def test_a_choice_is_continued_at_another_gateway(pool: LocalPool, engine: FakeEngine) -> None:
    other = PoolClient(pool.plan.name, transport=pool.transport)
    second = serve_gateway(other, [engine.url], bridge=ThinkingPolicy.TEMPLATE)
    async with bridged(pool, engine) as agent, second as url:
        reply = (await choices(agent, 3))[0]
        again = [*HELLO["messages"], reply, {"role": "user", "content": "and then?"}]
        asked = {**HELLO, "messages": again}
        async with agent.http.post(f"{url}{agent.path}/v1/chat/completions", json=asked) as answer:
            assert answer.status == 200
        assert await kinds(agent, pool) == ["", "not_continued", "not_continued", ""]


@pytest.mark.parametrize("has_key", [False, True])
async def test_the_trained_steps_are_the_answers_that_were_read_when_clients_leave_at_any_moment(
    pool: LocalPool, engine: FakeEngine, has_key: bool
) -> None:
    """With a key, they repeat a call until they have read its answer."""
    engine.faults = Faults(token_delay_s=0.002)
    drawn = random.Random(17)

    async def call(agent: Agent, key: str) -> bool:
        """Whether it was read: all that has come counts, up to the moment at which the client leaves."""
        stream = drawn.random() < 0.5
        connection, end = open_socket(agent, key, stream=stream), b'"finish_reason":"' if stream else b'"total_tokens"'
        leaves_at, data = time.monotonic() + drawn.choice((FOR_EVER, drawn.random() * 0.1)), bytearray()
        has_left = False
        while end not in data and not has_left:
            await asyncio.sleep(0.001)
            has_left = time.monotonic() > leaves_at
            with suppress(BlockingIOError):  # a wait that is cancelled could lose what it has just received
                data += connection.recv(65_536)
        hang_up(connection)
        return end in data

    was_read: list[bool] = []
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        for n in range(30):
            was_read.append(await call(agent, f"key {n}" if has_key else ""))
            while has_key and not was_read[-1]:
                was_read.append(await call(agent, f"key {n}"))
        found = await kinds(agent, pool)
    assert was_read.count(False) > 2, "some leave"
    assert found.count("") == was_read.count(True) > 3
    assert set(found) <= {"", "unseen"}
