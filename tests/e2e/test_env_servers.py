"""What an environment trains on is what the engine read and wrote: real vLLM, gateway and openai package.

The plain model writes printable letters and never ends its turn, so a history comes back as it was.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rig.calls import post
from rig.gateways import GatewayProcess
from rig.vllm_server import VllmServer
from rig.vocabulary import pieces
from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers import ManagedServer, SequenceNode, ServerManager
from tests.e2e.test_tools_and_formats import DEMANDED, ending_seed
from tests.e2e.weights import Weights

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "What is 17 * 23?"}
CALCULATOR: Json = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
ASKED: Json = {"max_tokens": 24, "temperature": 1.0, "tools": [CALCULATOR]}


@asynccontextmanager
async def session(base_url: str) -> AsyncIterator[ManagedServer]:
    servers = ServerManager([APIServerConfig(base_url=base_url, model_name="tiny")])
    try:
        async with servers.managed_server() as managed:
            yield managed
    finally:
        await servers.close()


@pytest.fixture(params=["gateway", "vllm"])
async def managed(
    request: pytest.FixtureRequest, gateway: GatewayProcess, vllm: VllmServer
) -> AsyncIterator[ManagedServer]:
    base_url = f"{gateway.url}/unrecorded/v1" if request.param == "gateway" else f"{vllm.url}/v1"
    async with session(base_url) as managed:
        yield managed


async def rendered(vllm: VllmServer, messages: list[Json]) -> list[int]:
    """The prompt as the engine itself reads it."""
    asked = {"model": "tiny", "messages": messages, "tools": [CALCULATOR], "add_generation_prompt": True}
    answer = await post(f"{vllm.url}/tokenize", asked)
    assert answer.status == 200, answer.text
    return list(answer.json()["tokens"])


def places(node: SequenceNode) -> list[int]:
    """Where it is trained."""
    return [place for place, mask in enumerate(node.masked_tokens) if mask != -100]


async def assert_rescored(weights: Weights, node: SequenceNode) -> None:
    """The engine, asked for all tokens at once, gives the same log-probabilities at what was sampled."""
    assert node.logprobs is not None
    rescored = await weights.logprobs(node.tokens[:1], node.tokens[1:])
    trained = np.array(places(node))
    np.testing.assert_allclose(np.array(node.logprobs)[trained], rescored[trained - 1], rtol=0, atol=1e-4)


async def test_a_tool_conversation_of_two_turns_is_one_sequence_of_the_engines_own_tokens(
    managed: ManagedServer, vllm: VllmServer, weights: Weights
) -> None:
    first = await managed.chat_completion(messages=[USER], seed=1, **ASKED)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    result = {"role": "tool", "tool_call_id": "call-1", "content": "391"}
    second = await managed.chat_completion(messages=[USER, said, result], seed=2, **ASKED)
    (node,) = managed.get_state()["nodes"]

    texts = [(reply.choices[0].message.content or "").encode() for reply in (first, second)]
    prompts = [await rendered(vllm, messages) for messages in ([USER], [USER, said, result])]
    assert node.tokens == [*prompts[1], *texts[1]]
    written = [range(len(prompt), len(prompt) + len(text)) for prompt, text in zip(prompts, texts, strict=True)]
    assert [len(text) for text in texts] == [24, 24]
    assert places(node) == [place for turn in written for place in turn]
    assert bytes(node.tokens[place] for place in places(node)) == b"".join(texts)
    assert node.exactness == "engine"
    assert node.metadata == {"finish_reason": "length", "turns": 2}
    await assert_rescored(weights, node)


async def test_a_history_that_is_told_otherwise_begins_a_sequence_and_none_is_lost(
    managed: ManagedServer, vllm: VllmServer, weights: Weights
) -> None:
    await managed.chat_completion(messages=[USER], seed=1, **ASKED)
    shortened = {"role": "assistant", "content": "(thinking was here)"}
    more = {"role": "user", "content": "And then?"}
    await managed.chat_completion(messages=[USER, shortened, more], seed=2, **ASKED)
    nodes = managed.get_state()["nodes"]
    prompts = [await rendered(vllm, messages) for messages in ([USER], [USER, shortened, more])]
    assert [node.tokens[:-24] for node in nodes] == prompts
    for node in nodes:
        assert places(node) == list(range(len(node.tokens) - 24, len(node.tokens)))
        await assert_rescored(weights, node)


async def test_a_tool_call_that_the_template_shows_otherwise_than_it_was_written_is_kept_as_it_was_written(
    managed: ManagedServer, vllm: VllmServer
) -> None:
    demanded = DEMANDED | {"messages": [USER]}
    called = await managed.chat_completion(seed=await ending_seed(vllm, demanded), **demanded)
    message = called.choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Done."} for call in message.tool_calls]
    await managed.chat_completion(messages=[USER, message, *results], max_tokens=8, tools=DEMANDED["tools"])
    first, second = managed.get_state()["nodes"]
    assert called.usage is not None
    assert len(places(first)) == called.usage.completion_tokens
    written = "".join(pieces([first.tokens[place] for place in places(first)]))
    assert written.count("<tool_call>") == len(message.tool_calls)
    assert len(places(second)) <= 8


async def test_each_of_several_choices_is_a_sequence_that_the_engine_rescores_alike(
    managed: ManagedServer, weights: Weights
) -> None:
    await managed.chat_completion(messages=[USER], n=3, seed=5, **ASKED)
    nodes = managed.get_state()["nodes"]
    assert len({tuple(node.tokens) for node in nodes}) == 3
    for node in nodes:
        await assert_rescored(weights, node)


async def test_the_gateway_says_which_weights_wrote_a_turn(
    gateway: GatewayProcess, weights: Weights, plain_models: tuple[Path, Path]
) -> None:
    async with session(f"{gateway.url}/unrecorded/v1") as managed:
        reply = await managed.chat_completion(messages=[USER], **ASKED)
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        (node,) = managed.get_state()["nodes"]
        assert node.policy_version == 1
        await weights.load(plain_models[1], "2")
        result = {"role": "tool", "tool_call_id": "call-1", "content": "391"}
        reply = await managed.chat_completion(messages=[USER, said, result], **ASKED)
        (node,) = managed.get_state()["nodes"]
    (choice,) = reply.model_dump()["choices"]
    assert (choice["policy_version"], choice["version_spans"]) == (2, [[2, 0, 24]])
    assert (node.policy_version, node.metadata["turns"]) == (1, 2)
