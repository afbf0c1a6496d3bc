"""The yardsticks of retried calls and dead gateways: what they break, and what they notice."""

import random
from collections import Counter

import aiohttp
import pytest

from benchmarks.survival.breaking_proxy import HANDED_OVER, Break, BreakingProxy, body_of, shuffled
from benchmarks.survival.dead_gateways import Rollout
from benchmarks.survival.retries import Compared
from benchmarks.survival.retrying_agents import RetryingAgents, answer_uniquely
from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.texts import text_of, texts_of

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}


def proxy_of(engine: FakeEngine, *breaks: Break, share: float = 1.0) -> BreakingProxy:
    chance = random.Random(1)
    return BreakingProxy(shuffled(breaks, chance), share, held=0.1, chance=chance, server=engine.url)


async def asked(url: str, *, stream: bool) -> tuple[int, str | None]:
    """The status is 0 if the connection broke."""
    async with aiohttp.ClientSession() as http:
        try:
            async with http.post(f"{url}/v1/chat/completions", json={**BODY, "stream": stream}) as answer:
                return answer.status, text_of(await answer.read())
        except aiohttp.ClientError:
            return 0, None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_proxy_without_breaks_passes_answers_on_and_knows_their_texts(engine: FakeEngine, stream: bool) -> None:
    async with proxy_of(engine, Break.AFTER, share=0.0) as proxy:
        status, text = await asked(proxy.url, stream=stream)
    assert (status, {text}) == (200, proxy.whole)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("broken", "status"),
    [(Break.BEFORE, 0), (Break.REFUSED, 503), (Break.MIDST, 0), (Break.AFTER, 0), (Break.FAILED, 503)],
)
async def test_a_broken_call_has_no_answer_and_is_known_as_handed_over_if_it_was(
    engine: FakeEngine, broken: Break, status: int, stream: bool
) -> None:
    engine.faults = Faults(token_delay_s=0.02)
    async with proxy_of(engine, broken) as proxy:
        assert await asked(proxy.url, stream=stream) == (status, None)
    assert bool(proxy.whole) == (broken in HANDED_OVER)
    assert proxy.broken == {broken: 1}


async def test_agents_read_every_answer_through_broken_calls(pool: LocalPool, engine: FakeEngine) -> None:
    answer_uniquely(engine)
    async with serve_gateway(pool, [engine.url]) as url:
        chance = random.Random(1)
        breaks = shuffled((Break.BEFORE, Break.REFUSED), chance)
        async with BreakingProxy(breaks, 0.3, held=0.1, chance=chance, server=url) as proxy:
            agents = RetryingAgents([proxy.url], has_keys=False, calls=(3, 3))
            await agents.run(agents=2, rollouts=4)
        batch = await pool.fetch_batch(4, timeout=60.0)
    read = {(uid, text) for uid, texts in agents.read.items() for text in texts}
    assert agents.asked > len(read) == 12
    assert set(texts_of(batch.steps())) == read
    assert agents.unanswered == 0


def test_an_answer_that_is_cut_off_is_none() -> None:
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n"
    assert body_of(whole) == b"hello!"
    assert {body_of(whole[:cut]) for cut in range(len(whole) - 6)} == {b""}
    assert body_of(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell") == b""
    assert text_of(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n') is None


def test_what_is_trained_and_was_not_read_counts_apart_if_it_was_handed_over() -> None:
    compared = Compared(Counter("abc"), Counter("abxyy"), {"x"})
    assert compared.figures("n") == {
        "n_read": 3,
        "n_trained": 5,
        "n_not_read": 3,
        "n_not_trained": 1,
        "n_handed_over": 1,
        "n_others_differ": 3,
        "n_differ_percent": 133.333,
    }


def test_a_rollout_is_truncated_if_an_answer_that_was_read_is_not_trained_and_whole_if_the_pool_has_all() -> None:
    truncated = Rollout(read=["a", "b"], held=["a"], trained=["a"], is_marked=False)
    assert (truncated.is_truncated, truncated.is_whole) == (True, False)
    needless = Rollout(read=["a", "b"], held=["a", "b", "c"], trained=[], is_marked=True)
    assert (needless.is_truncated, needless.is_whole) == (True, True)
