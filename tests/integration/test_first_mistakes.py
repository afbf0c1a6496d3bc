"""What a newcomer types wrongly gets a sentence that says what to do: real SDKs, real HTTP, a fake engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

import stepwell
from rig.fake_engine import FakeEngine
from rig.gateways import free_port, serve_gateway
from rig.issued_keys import CONTROL
from stepwell.errors import BadRequest, NotReady, StepwellError
from tests.integration.gateway.test_sessions import live_pool

ASKED: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


@pytest.fixture
async def url(engine: FakeEngine) -> AsyncIterator[str]:
    async with serve_gateway(live_pool(None), [engine.url], control_keys=[CONTROL]) as url:
        yield url


async def refusal(do: Callable[[], Any]) -> str:
    """What a program's user reads."""
    with pytest.raises((openai.APIError, StepwellError)) as failure:
        await asyncio.to_thread(do)
    return str(failure.value)


def chat(base_url: str, key: str = CONTROL, model: str = "tiny") -> Callable[[], Any]:
    def ask() -> Any:
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            return client.chat.completions.create(model=model, **ASKED)

    return ask


async def test_a_base_url_without_v1(url: str) -> None:
    assert f"the base_url of this gateway is {url}/v1" in await refusal(chat(url))


async def test_no_key(url: str) -> None:
    said = await refusal(chat(f"{url}/v1", "none"))
    assert "this needs a session key" in said
    assert "Authorization: Bearer KEY" in said


async def test_another_model(url: str) -> None:
    said = await refusal(chat(f"{url}/v1", model="gpt-4o"))
    assert "gpt-4o" in said
    assert "tiny" in said


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/v1", "{}/v1/"])
async def test_connect_takes_the_printed_base_url_and_the_address(url: str, spelling: str) -> None:
    run = await asyncio.to_thread(stepwell.connect, spelling.format(url), key=CONTROL)
    assert run.url == url


async def test_no_scheme(url: str) -> None:
    said = await refusal(lambda: stepwell.connect(url.removeprefix("http://"), key=CONTROL))
    assert "write http://host:port" in said


async def test_another_port() -> None:
    wrong = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(NotReady, match=f"no gateway answers at {wrong}"):
        await asyncio.to_thread(stepwell.connect, wrong, key=CONTROL, timeout=0.5)


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_trajectory_without_the_right_key(url: str, key: str | None) -> None:
    run = await asyncio.to_thread(stepwell.connect, url, key=key)
    said = await refusal(run.trajectory(prompt_uid="p").__enter__)
    assert "or a control key; send it as the header Authorization: Bearer KEY" in said


async def test_a_reward_that_is_no_number(url: str) -> None:
    run = await asyncio.to_thread(stepwell.connect, url, key=CONTROL)

    def attempt() -> None:
        with run.trajectory(prompt_uid="p", group_size=1) as t:
            chat(t.base_url, t.api_key)()
            t.reward = "good"  # type: ignore[assignment]

    said = await refusal(attempt)
    assert "reward" in said
    assert "number" in said


async def test_a_group_of_nobody(url: str) -> None:
    run = await asyncio.to_thread(stepwell.connect, url, key=CONTROL)
    said = await refusal(run.trajectory(prompt_uid="p", group_size=0).__enter__)
    assert "group_size" in said
    assert "must be at least 1" in said


async def test_a_mistyped_keyword(url: str) -> None:
    run = await asyncio.to_thread(stepwell.connect, url, key=CONTROL)
    with pytest.raises(TypeError, match="unexpected keyword argument 'promt_uid'"):
        run.trajectory(promt_uid="p")  # type: ignore[call-arg]


def test_an_address_is_told_apart_from_other_text() -> None:
    with pytest.raises(BadRequest, match="is not an address of a gateway; write http://host:port"):
        stepwell.connect("localhost:8100")
