"""A tool call broken off at any of its tokens, completed with the real engine's own parsers.

A random model does not call tools of itself, and a constrained answer is not carried on: so the tokens are given, and
the engine tells what a stream had sent of them and what they spell as a whole.
"""

import json
from typing import Any

import numpy as np
from openai.types.chat import ChatCompletionChunk
from stepwell.gateway.dialects.openai import ChatDialect

from rig.calls import post
from rig.vllm_server import VllmServer
from rig.vocabulary import END_OF_TURN, encode
from stepwell.engines.vllm import DERENDER, VllmEngine
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesStream
from stepwell.gateway.engine_answers import rest_chunk
from stepwell.steps.step import ids_array, logprobs_array
from stepwell.wire.openai import Sampled
from tests.e2e.episodes import heard_streamed

Json = dict[str, Any]

SAID = "Let me see. 🙂\n"
ARGUMENTS: Json = {"up": True, "note": "so wie früher"}
COMPACT = json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":"))
CALLED = f'<tool_call>{{"name":"flag","arguments":{COMPACT}}}</tool_call>'
"""Set otherwise than a parser writes JSON again."""
VLLM = VllmEngine()
IDS = [*encode(SAID + CALLED), END_OF_TURN]
PROMPT_IDS = encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
TOOL: Json = {"type": "function", "function": {"name": "flag", "parameters": {"type": "object"}}}
ASKED: Json = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "stream": True}


async def streamed_until(vllm: VllmServer, call: ModelCall, cut: int) -> Json:
    """What the engine's streaming parser sends of the first tokens."""
    choice = {"index": 0, "token_ids": IDS[:cut], "finish_reason": None}
    asked = {
        "stream": True,
        "generate_chunk": {"request_id": "broken", "choices": [choice]},
        "prompt_token_ids": PROMPT_IDS,
        "chat_request": {**call.request, "return_token_ids": True, "include_reasoning": True},
    }
    answer = await post(vllm.url + DERENDER, asked)
    assert answer.status == 200, answer.text
    chunk: Json = answer.json()["chunk"]
    chunk["choices"] = chunk["choices"] or [{"index": 0, "delta": {}}]
    return chunk


async def spelled(vllm: VllmServer, call: ModelCall, sampled: Sampled) -> Json:
    asked = VLLM.derender(call.request, sampled)
    answer = await post(vllm.url + asked.path, json.loads(asked.body or b""))
    assert answer.status == 200, answer.text
    return VLLM.read_derendered(answer.text.encode(), sampled)


async def test_a_tool_call_broken_off_anywhere_reaches_the_agent_whole(vllm: VllmServer) -> None:
    call = ChatDialect().read(json.dumps(ASKED).encode(), DialectContext(response_length=64))
    logprobs = logprobs_array(np.full(len(IDS), -1.0))
    sampled = Sampled(ids_array(PROMPT_IDS), ids_array(IDS), logprobs, "stop")
    message = await spelled(vllm, call, sampled)
    for cut in range(1, len(IDS)):
        stream, writer = ChoicesStream(VLLM, keep_ids=False), call.dialect.stream(call)
        begun = stream.read(json.dumps(await streamed_until(vllm, call, cut)).encode())
        chunks = [begun] if begun else []
        chunks.append(rest_chunk(call, stream, 0, message, sampled))
        events = [json.loads(writer.chunk(chunk)[6:]) for chunk in chunks]
        (heard,) = heard_streamed(ChatCompletionChunk.model_validate(event) for event in events)
        ((name, arguments),) = heard.tools
        assert (name, json.loads(arguments)) == ("flag", ARGUMENTS), cut
        assert heard.text == SAID
        assert heard.finish_reason == "tool_calls"
