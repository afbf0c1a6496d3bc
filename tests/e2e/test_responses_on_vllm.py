"""OpenAI's Responses API with the real engine: prompts as by chat, exact steps, and a conversation continued by ids."""

from typing import Any

from rig.vllm_server import MODEL_NAME
from stepwell.steps.step import Exactness
from tests.e2e.episodes import Episode

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: Any = [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
HISTORY: Any = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "input_text", "text": "Wie geht's? 你好 🙂"}]},
    {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "Hm."}],
        "encrypted_content": "of another server",
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    {"role": "user", "content": "And now?"},
]
CHAT_HISTORY: Any = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Wie geht's? 你好 🙂"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "Hm.",
        "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}}
            for n in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "tool", "tool_call_id": "c2", "content": "2"},
    {"role": "user", "content": "And now?"},
]
ASKED: Any = {"model": MODEL_NAME, "input": HISTORY, "tools": TOOLS}


async def test_a_prompt_is_that_of_chat_and_is_counted_by_the_engine(episode: Episode) -> None:
    client = episode.agent
    whole = await client.responses.create(**ASKED, max_output_tokens=8)
    async with client.responses.stream(**ASKED, max_output_tokens=8) as stream:
        last: Any = [event async for event in stream][-1]
    await client.chat.completions.create(model=MODEL_NAME, messages=CHAT_HISTORY, tools=CHAT_TOOLS, max_tokens=8)
    count = await client.responses.input_tokens.count(**ASKED)
    by_whole, by_stream, by_chat = await episode.steps()
    assert by_whole.prompt_ids.tolist() == by_stream.prompt_ids.tolist() == by_chat.prompt_ids.tolist()
    assert count.input_tokens == len(by_chat.prompt_ids)
    for response, step in ((whole, by_whole), (last.response, by_stream)):
        assert (step.exactness, step.quarantine, step.untrainable) == (Exactness.ENGINE, None, None)
        assert response.usage is not None
        assert response.usage.input_tokens == len(step.prompt_ids)
        assert response.usage.output_tokens == len(step.response_ids)
        assert response.id.startswith(f"resp-{step.uid}")


async def test_a_conversation_that_is_continued_by_ids_has_the_prompt_of_the_whole_one(episode: Episode) -> None:
    client = episode.agent
    first = await client.responses.create(model=MODEL_NAME, input="Hello", max_output_tokens=8)
    await client.responses.create(model=MODEL_NAME, input="Go on", previous_response_id=first.id, max_output_tokens=8)
    items: Any = [{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "Go on"}]
    await client.responses.create(model=MODEL_NAME, input=items, max_output_tokens=8)
    _, by_id, by_input = await episode.steps()
    assert by_id.prompt_ids.tolist() == by_input.prompt_ids.tolist()
