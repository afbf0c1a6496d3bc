"""Whatever a client sends is a call or a bad request; whatever an engine sends is an answer or the engine's fault."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import BadRequest, EngineUnavailable, PreviousResponseNotFound
from stepwell.gateway.dialects.openai_choices import ChoicesReply
from stepwell.wire.openai import NO_USAGE
from tests.unit.gateway.dialects.asking import JSON, asked, objects_with
from tests.unit.gateway.dialects.responses.asking_responses import AROUND, RESPONSES, ask

ANSWER: dict[str, Any] = {"choices": [{"message": {"content": "hi"}}]}
KINDS = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "item_reference"),
        *("custom_tool_call_output", "local_shell_call", "local_shell_call_output", "additional_tools", "other"),
    ]
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image", "input_file", "input_audio"])},
        optional=dict.fromkeys(("text", "refusal", "image_url", "file_data", "filename"), JSON | st.text(max_size=5)),
    )
    | JSON,
    max_size=3,
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
TEXTS = st.text(max_size=5) | JSON
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": KINDS, "role": ROLES, "call_id": TEXTS, "name": TEXTS, "arguments": TEXTS, "input": TEXTS},
        optional={
            "content": PARTS | TEXTS,
            "summary": PARTS | TEXTS,
            "output": PARTS | TEXTS,
            "encrypted_content": TEXTS,
            "action": objects_with("command", "env", "type") | JSON,
            "id": TEXTS,
            "namespace": TEXTS,
            "tools": JSON,
        },
    )
    | JSON,
    max_size=4,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "custom", "namespace", "local_shell", "web_search"]), "name": TEXTS},
        optional=dict.fromkeys(("description", "parameters", "strict", "format", "tools"), JSON),
    )
    | JSON,
    max_size=3,
)
FIELDS = objects_with(
    *("instructions", "tool_choice", "parallel_tool_calls", "max_output_tokens", "temperature", "text", "reasoning"),
    *("include", "metadata", "store", "user", "stream", "stop", "seed", "previous_response_id", "prompt_cache_key"),
)


@given(FIELDS, ITEMS | TEXTS, TOOLS | JSON)
def test_whatever_is_asked_is_a_call_or_a_bad_request(fields: dict[str, Any], given_input: Any, tools: Any) -> None:
    raw = json.dumps({**fields, "input": given_input, "tools": tools}).encode()
    try:
        call = RESPONSES.read(raw, AROUND)
        body = asked(call)
    except (BadRequest, PreviousResponseNotFound):
        return
    assert body["messages"]
    assert json.loads(RESPONSES.reply(call, ChoicesReply(ANSWER, (), NO_USAGE)))["object"] == "response"


FUNCTION = objects_with("name", "arguments", values=TEXTS) | JSON
CALLS = st.lists(
    st.fixed_dictionaries({"function": FUNCTION}, optional={"id": TEXTS, "index": JSON}) | JSON, max_size=3
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"content": TEXTS, "reasoning": TEXTS, "reasoning_content": TEXTS, "tool_calls": CALLS | JSON}
)


@given(MESSAGE | JSON, JSON, JSON)
def test_whatever_an_engine_answers_is_a_response_or_its_fault(message: Any, finish: Any, usage: Any) -> None:
    answer = {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}
    try:
        response = json.loads(RESPONSES.reply(ask(), ChoicesReply(answer, (), NO_USAGE)))
    except EngineUnavailable:
        return
    assert response["output"]


@given(st.lists(MESSAGE | JSON, max_size=4), JSON, JSON)
def test_whatever_an_engine_streams_is_a_response_or_its_fault(deltas: list[Any], finish: Any, usage: Any) -> None:
    writer = RESPONSES.stream(ask(stream=True))
    try:
        told = [writer.chunk({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
        told.append(writer.chunk({"choices": [{"delta": {}, "finish_reason": finish}], "usage": usage}))
    except EngineUnavailable:
        return
    events = b"".join([*told, writer.finish(NO_USAGE)]).decode().removesuffix("\n\n").split("\n\n")
    numbers = [json.loads(event.split("\ndata: ", 1)[1])["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
