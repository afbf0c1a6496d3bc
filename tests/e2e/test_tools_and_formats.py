"""Tool calls and JSON under the real engine's grammar: for the agent as OpenAI's, for the trainer token for token.

The grammar makes the random model obey; where it puts how much white space is its own affair, so a seed is looked for
with which it comes to an end.
"""

import asyncio
import json
from typing import Any

import pytest

from rig.calls import post
from rig.vllm_server import VllmServer
from rig.vocabulary import pieces
from stepwell.errors import FetchTimeout
from stepwell.pool.client import DataPool
from stepwell.steps.step import BRIDGED, Step
from tests.e2e.episodes import Episode

Json = dict[str, Any]

UP_OR_DOWN: Json = {
    "type": "object",
    "properties": {"up": {"type": "boolean"}},
    "required": ["up"],
    "additionalProperties": False,
}
FLAG_TOOL: Json = {
    "type": "function",
    "function": {"name": "flag", "description": "Raise the flag.", "parameters": UP_OR_DOWN, "strict": True},
}
AS_JSON: Json = {"type": "json_schema", "json_schema": {"name": "flag", "schema": UP_OR_DOWN, "strict": True}}
USER: Json = {"role": "user", "content": "Raise the flag!"}
ASKED: Json = {"model": "tiny", "max_tokens": 400}
DEMANDED: Json = ASKED | {"tools": [FLAG_TOOL], "tool_choice": "required"}
FORMATTED: Json = ASKED | {"response_format": AS_JSON}


async def ending_seed(vllm: VllmServer, asked: Json) -> int:
    """A seed with which the answer ends by itself."""
    for seed in range(30):
        answer = (await post(f"{vllm.url}/v1/chat/completions", asked | {"seed": seed})).json()
        if answer["choices"][0]["finish_reason"] in ("stop", "tool_calls"):
            return seed
    pytest.fail("no seed led to an end")


def assert_constrained(step: Step, why: str) -> None:
    assert step.untrainable is not None
    assert step.untrainable.startswith(f"constrained: {why}")
    assert step.response_logprobs is not None
    assert len(step.response_logprobs) == len(step.response_ids)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_required_tool_call_round_trips_over_two_turns(
    episode: Episode, vllm: VllmServer, stream: bool
) -> None:
    seed = await ending_seed(vllm, DEMANDED | {"messages": [USER]})
    called, first_count = await episode.ask(stream=stream, messages=[USER], seed=seed, **DEMANDED)
    assert {name for name, _ in called.tools} == {"flag"}
    assert all(isinstance(json.loads(arguments)["up"], bool) for _, arguments in called.tools)
    assert called.finish_reason == "tool_calls"

    calls = [
        {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(called.tools)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"Done: {call['id']}."} for call in calls]
    history = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    answered, second_count = await episode.ask(
        stream=stream, messages=history, seed=3, **ASKED | {"max_tokens": 16, "tools": [FLAG_TOOL]}
    )
    assert not answered.tools

    first, second = await episode.steps()
    assert [len(first.response_ids), len(second.response_ids)] == [first_count, second_count]
    assert_constrained(first, "tool_choice")
    assert_constrained(second, "a tool is strict")
    assert second.prompt_made == BRIDGED
    tokens = [*first.prompt_ids, *first.response_ids]
    assert second.prompt_ids[: len(tokens)].tolist() == tokens, "the model sees its calls as it wrote them"
    added = "".join(pieces(second.prompt_ids[len(tokens) :].tolist()))
    for result in results:
        assert f"<tool_response>{result['content']}</tool_response>" in added


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_held_to_a_schema_is_kept_for_those_who_ask_for_it(
    episode: Episode, vllm: VllmServer, stream: bool
) -> None:
    seed = await ending_seed(vllm, FORMATTED | {"messages": [USER]})
    answered, count = await episode.ask(stream=stream, messages=[USER], seed=seed, **FORMATTED)
    assert isinstance(json.loads(answered.text)["up"], bool)
    (step,) = await episode.steps()
    assert_constrained(step, "response_format")
    assert len(step.response_ids) == count


async def test_a_trainer_that_does_not_ask_gets_no_constrained_step(
    episode: Episode, pool: DataPool, vllm: VllmServer
) -> None:
    seed = await ending_seed(vllm, FORMATTED | {"messages": [USER]})
    await episode.ask(stream=False, messages=[USER], seed=seed, **FORMATTED)
    await asyncio.to_thread(episode.trajectory.__exit__, None, None, None)
    with pytest.raises(FetchTimeout):
        await asyncio.to_thread(pool.fetch_batch, 1, channel=episode.channel, timeout=0.5)
