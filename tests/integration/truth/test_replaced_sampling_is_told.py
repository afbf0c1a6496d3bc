"""Who asks for sampling parameters and gets others is told, in the answer and in the log. Live users get what they ask.

The agents are the real SDKs: openai's chat, completions and responses, and anthropic's messages.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from stepwell.gateway.dialects.request_rules import SamplingPolicy

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, agent_of
from rig.waiting import until
from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Role, SessionKey
from stepwell.access.key_file import KeyFile, create_key
from tests.integration.gateway.test_sessions import live_pool, trajectories

HEADER = "x-stepwell-sampling"
ON_POLICY = {"train": SamplingPolicy(on_policy=True)}
WITH_SESSIONS = {"train": SamplingPolicy(on_policy=True, of_sessions=True)}
ASKED: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9}
TOLD = "temperature=1.0;was=0.2, top_p=1;was=0.9"
CONTROL = "the-control-key-0123456789abcdef"
ANN = AccessKeys([CONTROL]).session_key(SessionKey("ann"))


async def headers_of(client: openai.AsyncOpenAI, dialect: str, **asked: Any) -> Mapping[str, str]:
    """The headers of the answer to a call with an SDK, in a dialect."""
    made: Any
    if dialect == "messages":
        async with anthropic.AsyncAnthropic(
            base_url=str(client.base_url), auth_token=client.api_key, max_retries=0
        ) as messages:
            hello: Any = {"model": "tiny", "max_tokens": 8, "messages": HELLO["messages"]}
            stream = asked.pop("stream", False)
            made = await messages.messages.with_raw_response.create(**hello, stream=stream, extra_body=asked)
    elif dialect == "responses":
        made = await client.responses.with_raw_response.create(
            model="tiny", input="hello", max_output_tokens=16, **asked
        )
    elif dialect == "completions":
        made = await client.completions.with_raw_response.create(model="tiny", prompt="hello", **asked)
    else:
        made = await client.chat.completions.with_raw_response.create(**HELLO, **asked)
    return dict(made.headers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
async def test_every_answer_says_what_was_replaced_and_by_what(
    pool: LocalPool, engine: FakeEngine, dialect: str, stream: bool
) -> None:
    async with serve_gateway(pool, [engine.url], sampling=ON_POLICY) as url, agent_of(url) as agent:
        headers = await headers_of(agent.client, dialect, stream=stream, **ASKED)
        assert headers[HEADER] == TOLD
        assert HEADER not in await headers_of(agent.client, dialect, stream=stream)


async def test_what_is_removed_is_named_too(pool: LocalPool, engine: FakeEngine) -> None:
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {"type": "object"}}}
    async with serve_gateway(pool, [engine.url], sampling=ON_POLICY) as url, agent_of(url) as agent:
        headers = await headers_of(agent.client, "chat", logit_bias={"5": -100}, tools=[tool])
    assert headers[HEADER] == "logit_bias=removed, strict_tools=removed"


async def test_one_line_of_a_channel_names_the_values_and_the_setting(
    pool: LocalPool, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    policies = {channel: SamplingPolicy(on_policy=True) for channel in ("train", "mine")}
    async with serve_gateway(pool, [engine.url], sampling=policies) as url:
        for channel in ("train", "mine"):
            async with agent_of(url, channel=channel) as agent:
                await agent.ask()
                for asked in (ASKED, {"top_p": 0.5}):
                    await agent.ask(**asked)
                counts = [
                    await agent.metric(f'stepwell_sampling_replaced_total{{parameter="{name}"}}') for name in ASKED
                ]
    assert counts == [2, 4]
    said = [line.getMessage() for line in caplog.records if "sampled as the trainer computes" in line.getMessage()]
    assert len(said) == 2
    for line, channel in zip(said, policies, strict=True):
        assert line.startswith(f"channel {channel}: ")
        assert TOLD in line
        assert f"--sampling {channel}=as_asked" in line


@pytest.mark.parametrize("root", ["/session", ""])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_a_live_user_gets_the_sampling_that_it_asks_for(engine: FakeEngine, dialect: str, root: str) -> None:
    pool = live_pool(None)
    async with (
        serve_gateway(pool, [engine.url], sampling=ON_POLICY, control_keys=[CONTROL]) as url,
        openai.AsyncOpenAI(base_url=_base_url(f"{url}{root}", dialect), api_key=ANN, max_retries=0) as client,
    ):
        assert HEADER not in await headers_of(client, dialect, **ASKED)
        await until(lambda: any(found.steps for found in trajectories(pool)), "the step")
    assert _sampled(engine) == (0.2, 0.9)
    ((step,),) = [list(found.steps.values()) for found in trajectories(pool)]
    assert step.untrainable == "truncated: top_p is 0.9"


def _base_url(root: str, dialect: str) -> str:
    """anthropic's SDK adds /v1 by itself."""
    return root if dialect == "messages" else f"{root}/v1"


async def test_an_opened_session_is_sampled_as_asked_and_a_rollout_beside_it_is_not(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url], sampling=ON_POLICY) as url:
        async with agent_of(url, session=True) as agent:
            assert HEADER not in await headers_of(agent.client, "chat", **ASKED)
        assert _sampled(engine) == (0.2, 0.9)
        async with agent_of(url) as agent:
            assert (await headers_of(agent.client, "chat", **ASKED))[HEADER] == TOLD
        assert _sampled(engine) == (1.0, 1)


async def test_a_session_that_a_header_names_is_sampled_as_asked(pool: LocalPool, engine: FakeEngine) -> None:
    named = {"x-session-id": "abc"}
    async with (
        serve_gateway(pool, [engine.url], sampling=ON_POLICY, control_keys=[CONTROL]) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=CONTROL, max_retries=0, default_headers=named) as client,
    ):
        headers = await headers_of(client, "chat", **ASKED)
        assert headers["x-stepwell-trajectory"] == "abc/session@abc"
        assert HEADER not in headers
    assert _sampled(engine) == (0.2, 0.9)


async def test_the_operator_can_sample_the_sessions_of_a_channel_on_policy_too(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with (
        serve_gateway(pool, [engine.url], sampling=WITH_SESSIONS, control_keys=[CONTROL]) as url,
        openai.AsyncOpenAI(base_url=f"{url}/session/v1", api_key=ANN, max_retries=0) as client,
    ):
        assert (await headers_of(client, "chat", **ASKED))[HEADER] == TOLD
    assert _sampled(engine) == (1.0, 1)


async def test_a_session_key_of_another_channel_is_not_sampled_as_train_is(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    key, _ = create_key(path, Role.SESSION, name="ann", channels=["live"])
    gateway: dict[str, Any] = {"sampling": WITH_SESSIONS, "control_keys": [CONTROL], "issued": KeyFile(path)}
    async with (
        serve_gateway(pool, [engine.url], **gateway) as url,
        openai.AsyncOpenAI(base_url=f"{url}/session/v1", api_key=key, max_retries=0) as client,
    ):
        assert HEADER not in await headers_of(client, "chat", **ASKED)


async def test_a_call_that_is_not_recorded_is_sampled_as_asked(pool: LocalPool, engine: FakeEngine) -> None:
    async with serve_gateway(pool, [engine.url], sampling=ON_POLICY) as url, agent_of(url) as agent:
        uncaptured = {"x-stepwell-capture": "off"}
        assert HEADER not in await headers_of(agent.client, "chat", extra_headers=uncaptured, **ASKED)
    assert _sampled(engine) == (0.2, 0.9)


def _sampled(engine: FakeEngine) -> tuple[float, float]:
    """What the engine was asked for last."""
    body = [seen.body for seen in engine.requests if "messages" in seen.body][-1]
    return body["temperature"], body["top_p"]
