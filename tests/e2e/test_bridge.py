"""The bridge on real vLLM: the turns of a rollout become one row, whatever bytes the model writes.

The gateway and the pool's shard are in the test's own process, without Ray.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of
from rig.vllm_server import VllmServer
from rig.vocabulary import END_OF_TURN
from stepwell.steps.columns import pack
from stepwell.steps.rows import MergedRows, merge_rows
from stepwell.steps.step import Step
from tests.e2e.episodes import heard_streamed, heard_whole

ROLLOUTS, TURNS = 4, 3
ENDING_SOON: dict[str, Any] = {"max_tokens": 120, "logit_bias": {str(END_OF_TURN): 5.0}}
"""Random weights hardly ever end a turn by themselves."""
FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": FLAG}}]

CHOSEN = {"type": "function", "function": {"name": "add"}}


async def reply_of(client: AsyncOpenAI, asked: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The reply as an agent puts it into its history."""
    if stream:
        (heard,) = heard_streamed([chunk async for chunk in await client.chat.completions.create(stream=True, **asked)])
    else:
        (heard,) = heard_whole(await client.chat.completions.create(**asked))
    calls = [
        {"id": f"call{place:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(heard.tools)
    ]
    return {"role": "assistant", "content": heard.text, **({"tool_calls": calls} if calls else {})}


async def converse(agent: Agent, rollout: int, *, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Turn {turn}: 你好 <|im_end|> 🙂"})
        asked = {"model": "tiny", "messages": messages, "seed": 10 * rollout + turn, **ENDING_SOON}
        messages.append(await reply_of(agent.client, asked, stream=stream))


async def roll_out(engine: str, policy: ThinkingPolicy | None, *, stream: bool) -> list[list[Step]]:
    """The steps of a group of conversations of some turns each."""
    pool = LocalPool()
    group: dict[str, Any] = {"prompt_uid": "p", "group_size": ROLLOUTS, "channel": "asked"}
    async with serve_gateway(pool, [engine], bridge=policy, response_length=256) as url:
        for rollout in range(ROLLOUTS):
            async with agent_of(url, trajectory_uid=str(rollout), **group) as agent:
                await converse(agent, rollout, stream=stream)
                await agent.complete(reward=float(rollout))
    steps = pool.taken("asked")
    return [[step for step in steps if step.trajectory_uid == str(rollout)] for rollout in range(ROLLOUTS)]


def rows_of(trajectories: Sequence[Sequence[Step]]) -> MergedRows:
    """Each sampled token is trained in one of them, and each is a sequence that the engine had."""
    steps = [step for trajectory in trajectories for step in trajectory]
    trajectory_of_S = np.repeat(np.arange(len(trajectories)), [len(trajectory) for trajectory in trajectories])
    rows = merge_rows(pack(steps), trajectory_of_S, np.zeros(len(trajectories), np.int64))
    assert int(rows.loss_mask.sum()) == sum(len(step.response_ids) for step in steps)
    had = {(*step.prompt_ids.tolist(), *step.response_ids.tolist()) for step in steps}
    for start, end in zip(rows.offsets_R[:-1], rows.offsets_R[1:], strict=True):
        assert tuple(rows.tokens[start:end].tolist()) in had
    return rows


@pytest.mark.parametrize("stream", [False, True])
async def test_the_turns_of_four_rollouts_become_four_rows(vllm: VllmServer, stream: bool) -> None:
    rollouts = await roll_out(vllm.url, ThinkingPolicy.TEMPLATE, stream=stream)
    for steps in rollouts:
        assert [step.finish_reason for step in steps] == ["stop"] * TURNS
        assert [step.quarantine for step in steps] == [None] * TURNS
        assert [step.prompt_made for step in steps] == ["rendered: first_turn", "bridged", "bridged"]
    assert len(rows_of(rollouts).trajectory_of_R) == ROLLOUTS


async def test_without_the_bridge_they_become_more(vllm: VllmServer) -> None:
    assert len(rows_of(await roll_out(vllm.url, None, stream=False)).trajectory_of_R) > ROLLOUTS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_cycle_is_one_row_and_its_calls_are_parsed(vllm: VllmServer, stream: bool) -> None:
    pool = LocalPool()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Add."}]
    async with (
        serve_gateway(pool, [vllm.url], bridge=ThinkingPolicy.TEMPLATE, response_length=256) as url,
        agent_of(url, channel="asked") as agent,
    ):
        for seed in range(3):
            asked = {"model": "tiny", "messages": messages, "tools": TOOLS, "seed": seed, "max_tokens": 250}
            reply = await reply_of(agent.client, {**asked, "tool_choice": CHOSEN}, stream=stream)
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "4"} for c in reply["tool_calls"]]
            messages += [reply, *results]
        await agent.complete(reward=1.0)
    steps = pool.taken("asked")
    assert [step.finish_reason for step in steps] == ["stop"] * 3
    assert [step.prompt_made for step in steps] == ["rendered: first_turn", "bridged", "bridged"]
    assert len(rows_of([steps]).trajectory_of_R) == 1
