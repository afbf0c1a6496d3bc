"""D20, T17: a call that is made again at another gateway is one trained step: that of the answer which was read."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import aiohttp
import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.texts import text_of, texts_of
from rig.waiting import until
from stepwell.errors import FetchTimeout
from stepwell.gateway.app import GatewayLimits
from stepwell.pool.client import PoolClient

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}
KEY = {"Idempotency-Key": "once"}
RETRY = {"x-stainless-retry-count": "1"}
LIMITS = GatewayLimits(ask_timeout=30.0, render_timeout=30.0, confirm_timeout=0.5)
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


@dataclass(frozen=True, slots=True)
class TwoGateways:
    http: aiohttp.ClientSession
    urls: list[str]
    pool: LocalPool

    async def open(self) -> str:
        async with self.http.post(f"{self.urls[0]}/init_trajectory", json={}) as answer:
            opened = await answer.json()
        return f"/{opened['trajectory_uid']}/{opened['prompt_uid']}"

    async def ask(
        self, gateway: int, path: str, headers: Mapping[str, str] = MappingProxyType({}), *, stream: bool = False
    ) -> tuple[int, str | None]:
        url = f"{self.urls[gateway]}{path}/v1/chat/completions"
        async with self.http.post(url, json={**BODY, "stream": stream}, headers=headers) as answer:
            return answer.status, text_of(await answer.read()) if answer.status == 200 else None

    async def trained(self, path: str) -> list[str]:
        """The texts, as a trainer gets them after the rollout has ended."""
        url = f"{self.urls[1]}{path}/v1/complete_trajectory"
        async with self.http.post(url, json={"reward": 1.0}) as answer:
            assert answer.status == 200, await answer.text()
        try:
            return [text for _, text in texts_of((await self.pool.fetch_batch(1, timeout=5.0)).steps())]
        except FetchTimeout:
            return []


@pytest.fixture
async def two_gateways(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[TwoGateways]:
    """They confirm each step before its answer."""
    engine.faults = Faults(ignore_seed=True)
    clients = [PoolClient(pool.plan.name, transport=pool.transport) for _ in range(2)]
    async with (
        serve_gateway(clients[0], [engine.url], is_durable=True, limits=LIMITS) as first,
        serve_gateway(clients[1], [engine.url], is_durable=True, limits=LIMITS) as second,
        aiohttp.ClientSession() as http,
    ):
        yield TwoGateways(http, [first, second], pool)


@streamed_or_not
async def test_calls_with_one_key_at_two_gateways_are_one_step(two_gateways: TwoGateways, stream: bool) -> None:
    """The first answer was recorded, and was lost on its way."""
    path = await two_gateways.open()
    await two_gateways.ask(0, path, KEY, stream=stream)
    status, read = await two_gateways.ask(1, path, KEY | RETRY, stream=stream)
    assert status == 200
    assert await two_gateways.trained(path) == [read]


@streamed_or_not
@pytest.mark.parametrize("gateways", [(0, 1, 0), (0, 1, 0, 1), (0, 0, 1), (0, 1, 1, 0)])
async def test_of_answers_with_one_key_the_one_that_was_given_last_is_trained(
    two_gateways: TwoGateways, stream: bool, gateways: tuple[int, ...]
) -> None:
    """All but the last were lost on their way. A gateway gives the answer that it has given before."""
    path = await two_gateways.open()
    given = [(await two_gateways.ask(gateway, path, KEY | RETRY, stream=stream))[1] for gateway in gateways]
    assert len(set(given)) == 2
    assert await two_gateways.trained(path) == given[-1:]


@streamed_or_not
async def test_an_answer_that_is_given_again_after_a_try_that_failed_elsewhere_is_trained(
    two_gateways: TwoGateways, engine: FakeEngine, stream: bool
) -> None:
    path = await two_gateways.open()
    _, given = await two_gateways.ask(0, path, KEY, stream=stream)
    engine.faults = Faults(error_status=400)
    assert await two_gateways.ask(1, path, KEY | RETRY, stream=stream) == (400, None)
    engine.faults = Faults(ignore_seed=True)
    assert await two_gateways.ask(0, path, KEY | RETRY, stream=stream) == (200, given)
    assert await two_gateways.trained(path) == [given]


async def test_the_same_key_in_two_rollouts_is_two_steps(two_gateways: TwoGateways) -> None:
    for gateway in range(2):
        path = await two_gateways.open()
        _, read = await two_gateways.ask(gateway, path, KEY)
        assert await two_gateways.trained(path) == [read]


@pytest.mark.parametrize("key", [{}, KEY])
async def test_a_stream_that_its_client_left_and_repeats_elsewhere_is_trained_once(
    two_gateways: TwoGateways, engine: FakeEngine, key: dict[str, str]
) -> None:
    path = await two_gateways.open()
    engine.faults = Faults(ignore_seed=True, token_delay_s=0.05)
    url = f"{two_gateways.urls[0]}{path}/v1/chat/completions"
    left = await two_gateways.http.post(url, json={**BODY, "stream": True}, headers=key)
    while b"content" not in await left.content.readline():
        pass
    left.close()
    await until(lambda: engine.in_flight == 0, "the engine to be free")
    engine.faults = Faults(ignore_seed=True)
    _, read = await two_gateways.ask(1, path, key, stream=True)
    assert await two_gateways.trained(path) == [read]


@pytest.mark.parametrize("key", [{}, KEY])
async def test_a_call_that_failed_for_want_of_the_pool_and_its_retry_are_one_step(
    two_gateways: TwoGateways, pool: LocalPool, engine: FakeEngine, key: dict[str, str]
) -> None:
    path = await two_gateways.open()
    engine.pause()
    failing = asyncio.create_task(two_gateways.ask(0, path, key))
    await until(lambda: engine.in_flight == 1, "the call to arrive")
    pool.away = True
    engine.resume()
    assert await failing == (503, None)
    pool.away = False
    status, read = await two_gateways.ask(1, path, key | RETRY)
    assert status == 200
    assert await two_gateways.trained(path) == [read]
