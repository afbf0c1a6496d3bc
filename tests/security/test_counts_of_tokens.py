"""A call that counts tokens reaches an engine too: it has the request rules and the quotas of other calls."""

from io import BytesIO
from typing import Any

import orjson
import pytest
from stepwell.gateway.dialects.request_rules import RequestRules
from stepwell.gateway.requests import CallQuota

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of

MESSAGES, RESPONSES = "messages/count_tokens", "responses/input_tokens"
ELSEWHERE = ("http://169.254.169.254/latest/meta-data/", "file:///etc/passwd", "https://10.0.0.1/x.png")
INLINE = "data:image/png;base64,AAAA"


def shown(path: str, url: str) -> dict[str, Any]:
    """A request that shows an image."""
    if path == MESSAGES:
        image: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": url}}
        if url == INLINE:
            image["source"] = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        return {"model": "default", "messages": [{"role": "user", "content": [image]}]}
    return {
        "model": "default",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        "chat_template_kwargs": {"enable_thinking": False, "chat_template": "x"},
    }


async def count(agent: Agent, path: str, body: object) -> tuple[int, str]:
    async with agent.http.post(f"{agent.path}/v1/{path}", json=body) as answer:
        return answer.status, await answer.text()


def counted(engine: FakeEngine) -> list[Any]:
    return [seen.body for seen in engine.requests if seen.path == "/tokenize" and "messages" in seen.body]


@pytest.mark.parametrize("url", ELSEWHERE)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_no_engine_fetches_an_address_to_count_tokens(
    pool: LocalPool, engine: FakeEngine, path: str, url: str
) -> None:
    rules = RequestRules(media_hosts=frozenset(("pictures.example",)))
    async with serve_gateway(pool, [engine.url], rules=rules) as gateway, agent_of(gateway) as agent:
        before = len(counted(engine))
        status, text = await count(agent, path, shown(path, url))
    assert status == 400, text
    assert "must be in the request" in text
    assert len(counted(engine)) == before


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_an_image_in_the_request_is_counted(pool: LocalPool, engine: FakeEngine, path: str) -> None:
    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        status, text = await count(agent, path, shown(path, INLINE))
    assert status == 200, text
    assert orjson.loads(text)["input_tokens"] > 0


async def test_a_count_sets_no_more_of_the_template_than_a_call(pool: LocalPool, engine: FakeEngine) -> None:
    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        await count(agent, RESPONSES, shown(RESPONSES, INLINE))
        assert await agent.metric("stepwell_request_fields_removed_total") == 1
    assert counted(engine)[-1]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("chunked", [False, True], ids=["with its size", "in chunks"])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_the_bodies_of_counts_take_from_the_quota(
    pool: LocalPool, engine: FakeEngine, path: str, *, chunked: bool
) -> None:
    body = orjson.dumps({**shown(path, INLINE), "metadata": {"padding": " " * 5_000}})
    async with (
        serve_gateway(pool, [engine.url], quota=CallQuota(bytes=4_000)) as gateway,
        agent_of(gateway) as agent,
        agent.http.post(
            f"{agent.path}/v1/{path}",
            data=BytesIO(body) if chunked else body,
            headers={"Content-Type": "application/json"},
            chunked=chunked or None,
        ) as answer,
    ):
        text = await answer.text()
        assert answer.status == 429
        assert await agent.metric('stepwell_quota_refused_total{quota="bytes"}') == 1
    assert "quota bytes=4000 is used up" in text


async def test_counts_and_calls_have_one_rate(pool: LocalPool, engine: FakeEngine) -> None:
    quota = CallQuota(per_second=0.1)
    async with serve_gateway(pool, [engine.url], quota=quota) as gateway, agent_of(gateway) as agent:
        await agent.ask()
        status, text = await count(agent, MESSAGES, shown(MESSAGES, INLINE))
    assert status == 429, text
    assert "per_second=0.1" in text
