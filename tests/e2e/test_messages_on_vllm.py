"""Anthropic's Messages API with the real engine: prompts as by chat, exact steps, and the engine's count of tokens."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from rig.vllm_server import MODEL_NAME
from stepwell.steps.step import Exactness
from tests.e2e.episodes import Episode

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
HISTORY: Any = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Wie geht's? 你好 🙂", "cache_control": {"type": "ephemeral"}}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "of another server"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {"a": 2}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "And now?"},
        ],
    },
]
CHAT_HISTORY: Any = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Wie geht's? 你好 🙂"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "Hm.",
        "tool_calls": [
            {"id": f"toolu_{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}}
            for n in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "toolu_1", "content": "1"},
    {"role": "tool", "tool_call_id": "toolu_2", "content": "2"},
    {"role": "user", "content": "And now?"},
]
ASKED: Any = {"model": MODEL_NAME, "system": "Be kind.", "messages": HISTORY, "tools": TOOLS}


@pytest.fixture
async def client(episode: Episode) -> AsyncIterator[anthropic.AsyncAnthropic]:
    base_url, key = str(episode.agent.base_url), episode.agent.api_key
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0) as client:
        yield client


async def test_a_prompt_is_that_of_chat_and_is_counted_by_the_engine(
    episode: Episode, client: anthropic.AsyncAnthropic
) -> None:
    whole = await client.messages.create(**ASKED, max_tokens=8)
    async with client.messages.stream(**ASKED, max_tokens=8) as stream:
        streamed = await stream.get_final_message()
    await episode.agent.chat.completions.create(model=MODEL_NAME, messages=CHAT_HISTORY, tools=CHAT_TOOLS, max_tokens=8)
    count = await client.messages.count_tokens(**ASKED)
    by_whole, by_stream, by_chat = await episode.steps()
    assert by_whole.prompt_ids.tolist() == by_stream.prompt_ids.tolist() == by_chat.prompt_ids.tolist()
    assert count.input_tokens == len(by_chat.prompt_ids)
    for message, step in ((whole, by_whole), (streamed, by_stream)):
        assert (step.exactness, step.quarantine, step.untrainable) == (Exactness.ENGINE, None, None)
        assert message.usage.input_tokens == len(step.prompt_ids)
        assert message.usage.output_tokens == len(step.response_ids)
        assert message.id.startswith(f"msg_{step.uid}")
