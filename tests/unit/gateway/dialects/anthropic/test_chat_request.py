import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.gateway.dialects.messages_request import TranslatedRequest, translate_request

from stepwell.access.access_keys import AccessKeys
from stepwell.errors import BadRequest
from stepwell.gateway.dialects.chat_form import StepSeal
from stepwell.gateway.dialects.side_calls import side_call_kind
from tests.unit.gateway.dialects.asking import JSON, objects_with

SEAL = StepSeal(AccessKeys(["control-key-of-the-tests"]))
FIRST, SECOND = "a" * 32, "b" * 32
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SHOWN_PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def use(call_id: str, name: str = "add", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id: str, content: Any = "3", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def translated(*messages: Any, **fields: Any) -> TranslatedRequest:
    given = {"model": "m", "max_tokens": 8, "messages": list(messages) or [{"role": "user", "content": "hi"}], **fields}
    return translate_request(json.loads(json.dumps(given)), SEAL)


def told(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(translated(*messages, **fields).request["messages"])


def asked(**fields: Any) -> dict[str, Any]:
    """The fields beside messages, model and max_tokens."""
    request = translated(**fields).request
    return {name: value for name, value in request.items() if name not in ("messages", "model", "max_tokens")}


# -- the conversation --------------------------------------------------------------------------------------------------


def test_a_text_is_the_same_as_a_string_and_as_blocks_with_a_cache_mark() -> None:
    as_string = told({"role": "user", "content": "hi"}, system="be kind")
    as_blocks = told(user(text("hi", **CACHED)), system=[text("be kind", **CACHED)])
    assert as_string == as_blocks
    assert as_string == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


def test_texts_of_a_user_are_lines_and_texts_of_an_answer_are_one_text() -> None:
    messages = told(
        user(text("a"), text("b")), assistant(text("c"), text("d")), user(text("e")), system=[text("x"), text("y")]
    )
    assert [message["content"] for message in messages] == ["x\ny", "a\nb", "cd", "e"]


def test_a_system_message_may_stand_anywhere() -> None:
    messages = told(user(text("a")), {"role": "system", "content": "mind"}, user(text("b")), system="be kind")
    assert [(m["role"], m["content"]) for m in messages] == [
        *(("system", "be kind"), ("user", "a")),
        *(("system", "mind"), ("user", "b")),
    ]
    first = told({"role": "system", "content": "mind"}, user(text("a")), system="be kind")
    assert first[0] == {"role": "system", "content": "be kind\nmind"}


def test_consecutive_messages_of_one_role_are_one() -> None:
    messages = told(user(text("a")), user(text("b")), assistant(text("c")), assistant(use("1")), user(result("1")))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert (messages[0]["content"], messages[1]["content"]) == ("a\nb", "c")


def test_parallel_tools_are_called_in_one_message_and_answered_before_the_user_says_more() -> None:
    messages = told(
        user(text("add")),
        assistant(text("well"), use("1", a=1), use("2", "sub", b=[2, None])),
        user(text("first"), result("2", [text("x"), text("y")]), result("1", None), text("now?")),
    )
    calls = messages[1]["tool_calls"]
    assert [(call["id"], call["function"]) for call in calls] == [
        ("1", {"name": "add", "arguments": '{"a":1}'}),
        ("2", {"name": "sub", "arguments": '{"b":[2,null]}'}),
    ]
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "2", "content": "x\ny"},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "user", "content": "first\nnow?"},
    ]


@pytest.mark.parametrize(("said", "heard"), [("no file", "Error: no file"), ("Error: gone", "Error: gone")])
def test_a_failed_tools_result_says_that_it_is_an_error(said: str, heard: str) -> None:
    messages = told(assistant(use("1")), user(result("1", said, is_error=True)))
    assert messages[1]["content"] == heard
    assert told(assistant(use("1")), user(result("1", said, is_error=False)))[1]["content"] == said


def test_thoughts_are_reasoning_and_redacted_ones_are_left_out() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "of another server"}
    redacted = {"type": "redacted_thinking", "data": "of another server"}
    request = translated(user(text("a")), assistant(thought, redacted, text("b")), user(text("c")))
    said = {"role": "assistant", "content": "b", "reasoning": "hm", "reasoning_content": "hm"}
    assert request.request["messages"][1] == said
    assert request.echoed == ()


def test_images_are_passed_on_and_those_of_a_tool_come_with_the_users_message() -> None:
    linked = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    messages = told(assistant(use("1")), user(result("1", [text("seen"), PNG]), text("what?"), linked))
    assert messages[1] == {"role": "tool", "tool_call_id": "1", "content": "seen"}
    shown_link = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    assert messages[2] == {"role": "user", "content": [SHOWN_PNG, text("what?"), shown_link]}


def test_a_document_of_text_is_a_text() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
    inner = {"type": "document", "source": {"type": "content", "content": [text("b"), text("c")]}}
    assert told(user(plain, inner))[0]["content"] == "a\nb\nc"


def test_an_answer_that_the_client_begins_is_continued() -> None:
    request = translated(user(text("a")), assistant(text("{"))).request
    assert (request["add_generation_prompt"], request["continue_final_message"]) == (False, True)
    assert "continue_final_message" not in asked()


# -- what is sent back sealed ------------------------------------------------------------------------------------------


def test_ids_and_signatures_prove_their_steps_and_the_engine_gets_its_own_ids() -> None:
    one, two = SEAL.attach("call-1", FIRST), SEAL.attach("call-2", SECOND)
    thought = {"type": "thinking", "thinking": "hm", "signature": SEAL.seal(SECOND)}
    request = translated(
        *(user(text("a")), assistant(use(one)), user(result(one))),
        *(assistant(thought, use(two)), user(result(two))),
    )
    assert request.echoed == (FIRST, SECOND)
    messages = request.request["messages"]
    assert [messages[1]["tool_calls"][0]["id"], messages[2]["tool_call_id"]] == ["call-1", "call-1"]
    assert [messages[3]["tool_calls"][0]["id"], messages[4]["tool_call_id"]] == ["call-2", "call-2"]


def test_arguments_that_were_no_object_are_counted() -> None:
    request = translated(
        assistant(use("1", malformed='{"a":'), {**use("2"), "input": [1]}), user(result("1"), result("2"))
    )
    assert request.malformed_history == 2
    assert [call["function"]["arguments"] for call in request.request["messages"][0]["tool_calls"]] == [
        '{"malformed":"{\\"a\\":"}',
        '{"malformed":[1]}',
    ]


# -- Claude Code -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_blocks", [True, False])
def test_the_line_that_claude_code_changes_in_every_call_is_removed(as_blocks: bool) -> None:
    prompts = []
    for number in (1, 2):
        line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0{number}a;"
        rest = "You are Claude Code, Anthropic's official CLI for Claude."
        system: Any = (
            [text(line), text(rest, **CACHED), text("Be brief.")] if as_blocks else f"{line}\n\n{rest}\nBe brief."
        )
        prompts.append(told(system=system)[0]["content"])
    assert prompts == ["You are Claude Code, Anthropic's official CLI for Claude.\nBe brief."] * 2


def test_side_calls_are_known_by_the_system_prompt_and_by_the_users_last_text() -> None:
    first = "x-anthropic-billing-header: cch=1;\nYou are Claude Code, Anthropic's official CLI for Claude."
    title = translated(
        system=[text(first), text("Generate a concise, sentence-case title (3-7 words) that captures x")]
    )
    assert side_call_kind(title.texts, 64, None) == "title"
    reminder, summary = text("<system-reminder>x</system-reminder>"), text("# Dream: Memory Consolidation\n…")
    memory = translated(user(reminder, summary))
    assert side_call_kind(memory.texts, 64, None) == "memory"
    task = translated(user(reminder, text("write a title generator")), system=first)
    assert side_call_kind(task.texts, 64, None) is None


# -- the other fields --------------------------------------------------------------------------------------------------


def test_sampling_parameters_keep_their_meaning() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stream": True}
    assert asked(**fields, stop_sequences=["a", "b"]) == {**fields, "stop": ["a", "b"]}
    assert asked(stop_sequences=[], tools=[], temperature=None) == {}


def test_unknown_fields_are_ignored() -> None:
    new = {"metadata": {"user_id": "x"}, "service_tier": "auto", "context_management": {}, "n": 4, "prompt": "x"}
    assert asked(**new, betas=["x"], logprobs=5, kv_transfer_params={}) == {}


def test_tools_are_functions() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [
        {"name": "add", "description": "Adds.", "input_schema": schema, **CACHED},
        {"type": "custom", "name": "sub", "input_schema": schema, "strict": True, "defer_loading": False},
    ]
    assert asked(tools=tools)["tools"] == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}},
        {"type": "function", "function": {"name": "sub", "parameters": schema, "strict": True}},
    ]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
    ],
)
def test_the_choice_of_tools_keeps_its_meaning(choice: dict[str, Any], wanted: dict[str, Any]) -> None:
    fields = asked(tools=[{"name": "add", "input_schema": {}}], tool_choice=choice)
    fields.pop("tools")
    assert fields == wanted
    assert asked(tool_choice=choice) == {}, "there is no tool to choose"


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"include_reasoning": True}),
        ({"type": "adaptive"}, {"include_reasoning": True}),
        ({"type": "disabled"}, {"include_reasoning": False}),
        (None, {}),
    ],
)
def test_thinking_is_only_hidden_by_a_wish(thinking: Any, wanted: dict[str, Any]) -> None:
    assert asked(thinking=thinking) == wanted


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_structured_output_is_a_response_format(where: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    fields = asked(
        **({"output_config": {"format": wanted, "effort": "low"}} if where == "output_config" else {where: wanted})
    )
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert asked(output_config={"effort": "low"}) == {}


# -- refusals ----------------------------------------------------------------------------------------------------------

SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0: every message"),
        ({"messages": ["x"]}, "messages.0: every message"),
        ({"messages": [{"role": "user"}]}, "messages.content must be a list"),
        ({"messages": [user("x")]}, "messages.content: every block must be an object"),
        ({"messages": [user({"type": "container_upload"})]}, "blocks of type container_upload are not supported"),
        ({"messages": [user(use("1"))]}, "blocks of type tool_use are not supported"),
        ({"messages": [assistant({"type": "server_tool_use"})]}, "blocks of type server_tool_use are not supported"),
        ({"messages": [user({"type": "text"})]}, "text.text must be a string"),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "source of type file"),
        ({"messages": [user({"type": "document", "source": {"type": "base64"}})]}, "source of type base64"),
        ({"messages": [user({"type": "tool_result"})]}, "tool_result.tool_use_id must be a string"),
        ({"messages": [{"role": "system", "content": ""}]}, "the messages have no text"),
        ({"system": [PNG]}, "a block of type image cannot stand here"),
        ({"system": 5}, "system must be a list"),
        ({"tools": [SEARCH]}, "web_search has no input_schema; .* web_search_20250305"),
        ({"tools": {"a": 1}}, "tools must be a list"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name must be a string"),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": []}}, "tool_choice.type must be"),
        ({"stop_sequences": [1]}, "stop_sequences must be a string"),
        ({"thinking": True}, "thinking must be an object"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type must be json_schema"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        translate_request({"model": "m", "messages": [user(text("hi"))], **fields}, SEAL)


def test_an_input_nested_too_deep_to_be_written_again_is_refused() -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(BadRequest, match="input of a tool_use cannot be passed on"):
        translate_request({"messages": [assistant({**use("1"), "input": {"a": deep}})]}, SEAL)


BLOCK = objects_with("type", "text", "id", "input", "content", "source", "thinking") | st.builds(
    lambda kind, more: {**more, "type": kind},
    st.sampled_from(["text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"]),
    objects_with("text", "id", "name", "input", "content", "tool_use_id", "source", "thinking", "signature", "data"),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=3) | st.lists(BLOCK | JSON, max_size=3),
    }
)
FIELDS = objects_with(
    *("system", "tools", "tool_choice", "thinking", "stop_sequences", "output_config", "output_format", "max_tokens"),
    *("temperature", "stream", "model", "x"),
)


@given(FIELDS, st.lists(MESSAGE, max_size=3) | JSON)
def test_whatever_is_asked_is_translated_or_a_bad_request(fields: dict[str, Any], messages: Any) -> None:
    try:
        request = translate_request({**fields, "messages": messages}, SEAL).request
    except BadRequest:
        return
    assert all(isinstance(message["role"], str) for message in request["messages"])
    json.dumps(request)
