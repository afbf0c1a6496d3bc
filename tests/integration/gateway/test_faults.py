"""An engine at its worst, and an agent with the real openai package: it gets a right answer or a right error, and the
pool a right step or a quarantined one. Streams that fail or do not add up are in test_streaming.py."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, Agent, Heard, agent_of
from rig.vocabulary import END_OF_TURN, encode
from stepwell.steps.step import Step

streamed_or_not = pytest.mark.parametrize("stream", [False, True])
SAID = "four and twenty letters"
TEXTS = "naïve ☕ 日本語 𝄞 e\u0301"
"""Characters of two, three and four bytes, and one that Unicode's NFC would change."""


@pytest.fixture
async def agent(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        yield agent


async def recorded(agent: Agent, pool: LocalPool) -> Step:
    """The one step of the agent's, sound and whole."""
    assert await agent.complete() == "completed"
    (step,) = pool.taken()
    assert step.quarantine is None
    assert step.response_logprobs is not None
    assert len(step.response_logprobs) == len(step.response_ids)
    return step


async def quarantined(agent: Agent, pool: LocalPool) -> list[str]:
    """By kind, the agent's steps, none of which is sound."""
    ended = await agent.complete(reward=1.0)
    kinds = list(pool.rules.stats().quarantined.elements())
    assert ended == ("completed" if kinds else "empty"), "a rollout with a recorded call counts by its reward"
    assert pool.rules.take(1, untrainable=True) is None, "nothing of it is trained"
    return kinds


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (Faults(drop_ids=True), "no_response_ids"),
        (Faults(short_ids=True), "logprob_count"),
        (Faults(logprob_value=float("nan")), "bad_logprob"),
        (Faults(logprob_value=-9999.0), "bad_logprob"),
        (Faults(logprob_value=0.5), "bad_logprob"),
        (Faults(wrong_usage=True), "response_count"),
    ],
)
async def test_an_answer_that_does_not_add_up_reaches_the_agent_and_is_quarantined(
    agent: Agent, pool: LocalPool, engine: FakeEngine, faults: Faults, kind: str, stream: bool
) -> None:
    engine.faults = faults
    engine.replies.append(Reply(SAID))
    assert await agent.ask(stream=stream) == Heard(SAID, "stop")
    assert await quarantined(agent, pool) == [kind]


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (Faults(disconnect_at_token=5), "broke off in its answer"),
        (Faults(hang_up=True), "no engine answers"),
        (Faults(malformed="not_json"), "not JSON"),
        (Faults(malformed="no_choices"), "no choices"),
        (Faults(error_status=500), "told to fail"),
    ],
)
async def test_an_answer_that_does_not_come_is_an_openai_error_and_no_step(
    agent: Agent, pool: LocalPool, engine: FakeEngine, faults: Faults, why: str
) -> None:
    engine.faults = faults
    with pytest.raises(openai.InternalServerError, match=why):
        await agent.ask()
    assert await quarantined(agent, pool) == []


async def test_an_error_at_a_token_of_an_unstreamed_answer_trains_nothing(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.faults = Faults(error_at_token=5)
    assert (await agent.ask()).finish_reason == "error"
    assert await quarantined(agent, pool) == ["cut_short"]


@streamed_or_not
@pytest.mark.parametrize("at", [0, 1, 5])
async def test_an_answer_aborted_at_a_token_is_carried_on(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool, at: int
) -> None:
    engine.faults = Faults(abort_at_token=at, times=1)
    engine.replies.extend([Reply(SAID), Reply(SAID[at:])])
    assert await agent.ask(stream=stream) == Heard(SAID, "stop")
    assert (await recorded(agent, pool)).response_ids.tolist() == [*encode(SAID), END_OF_TURN]


@streamed_or_not
async def test_an_answer_aborted_again_and_again_is_an_openai_error_and_trains_nothing(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = Faults(abort_at_token=1)
    with pytest.raises(openai.APIError, match="broke the answer off"):
        await agent.ask(stream=stream)
    assert await quarantined(agent, pool) == (["cut_short"] if stream else [])


@streamed_or_not
async def test_an_answer_that_cannot_be_carried_on_is_an_openai_error_and_trains_nothing(
    pool: LocalPool, stream: bool
) -> None:
    async with FakeEngine(scale_out=False) as engine, serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        engine.faults = Faults(abort_at_token=3, times=1)
        with pytest.raises(openai.APIError, match="cannot tell what its tokens spell"):
            await agent.ask(stream=stream)
        assert await quarantined(agent, pool) == (["cut_short"] if stream else [])


@streamed_or_not
async def test_an_engine_that_hangs_up_before_its_answer_is_not_noticed_where_there_is_another(
    pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    async with FakeEngine(replies=[SAID]) as other, serve_gateway(pool, [engine.url, other.url]) as url:
        engine.faults = Faults(hang_up=True)
        async with agent_of(url) as agent:
            assert await agent.ask(stream=stream) == Heard(SAID, "stop")
            await recorded(agent, pool)


@streamed_or_not
async def test_slow_headers_are_waited_for(agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool) -> None:
    engine.faults = Faults(delay_s=0.5)
    engine.replies.append(Reply(SAID))
    assert await agent.ask(stream=stream) == Heard(SAID, "stop")
    await recorded(agent, pool)


@streamed_or_not
async def test_bytes_that_are_no_utf8_are_replaced_and_the_ids_are_right(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = Faults(invalid_utf8=True)
    engine.replies.append(Reply(SAID))
    heard = await agent.ask(stream=stream)
    assert "\ufffd" in heard.text
    assert heard.text.replace("\ufffd", "").replace("(", "") == SAID
    assert (await recorded(agent, pool)).response_ids.tolist() == [*encode(SAID), END_OF_TURN]


async def test_a_stream_cut_within_characters_and_line_ends_is_put_together_again(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.faults = Faults(awkward_splits=True)
    engine.replies.append(Reply(TEXTS))
    heard = await agent.ask(stream=True, max_tokens=64)
    step = await recorded(agent, pool)
    assert step.response_ids.tolist() == [*encode(TEXTS), END_OF_TURN]
    assert encode(heard.text) == step.response_ids.tolist()[:-1]


@streamed_or_not
async def test_a_tool_result_of_five_megabytes_is_answered_and_recorded_to_the_last_token(
    pool: LocalPool, stream: bool
) -> None:
    room = 6_000_000
    async with (
        FakeEngine(max_model_len=room, replies=[SAID]) as engine,
        serve_gateway(pool, [engine.url], prompt_length=room) as url,
        agent_of(url) as agent,
    ):
        heard = await agent.ask(stream=stream, messages=[*HELLO["messages"], *tool_turn("{}", "x" * 5_000_000)])
        assert heard == Heard(SAID, "stop")
        assert len((await recorded(agent, pool)).prompt_ids) > 5_000_000


@streamed_or_not
@pytest.mark.parametrize("arguments", ['{"a": 1, "b"', "[1, 2]", "not JSON at all", '{"a": "\\ud800"}'])
async def test_malformed_tool_arguments_in_the_history_do_not_end_the_episode(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool, arguments: str
) -> None:
    engine.replies.append(Reply(SAID))
    heard = await agent.ask(stream=stream, messages=[*HELLO["messages"], *tool_turn(arguments, "no such tool")])
    assert heard == Heard(SAID, "stop")
    assert (await recorded(agent, pool)).extras["malformed_history"] == 1


@streamed_or_not
async def test_well_formed_tool_arguments_in_the_history_are_passed_on_as_they_were_written(
    agent: Agent, engine: FakeEngine, stream: bool
) -> None:
    arguments = '{"z": 1,  "a": "ü "}'
    await agent.ask(stream=stream, messages=[*HELLO["messages"], *tool_turn(arguments, "2")])
    (seen,) = [seen for seen in engine.requests if "chat" in seen.path]
    assert seen.body["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments


def tool_turn(arguments: str, result: str) -> list[dict[str, Any]]:
    """The model has called a tool, and was told the result."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
