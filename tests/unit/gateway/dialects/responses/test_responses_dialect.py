import json
from typing import Any

import orjson
import pytest
from stepwell.gateway.dialects.responses_dialect import LARGEST_STORED

from stepwell.errors import BadRequest, PreviousResponseNotFound
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesReply
from stepwell.wire.openai import Usage
from tests.unit.gateway.dialects.asking import asked
from tests.unit.gateway.dialects.responses.asking_responses import (
    AROUND,
    ONE,
    RESPONSES,
    SEAL,
    Json,
    ask,
    returned,
    said,
    user,
)

SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}


def answered(call: ModelCall, message: Json, finish_reason: str = "stop", **head: Any) -> Json:
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    reply = ChoicesReply({"model": "tiny", "choices": [choice], **head}, (), Usage(3, 4))
    return dict(json.loads(RESPONSES.reply(call, reply)))


def test_a_text_is_the_users_message() -> None:
    call = ask()
    assert call.request["messages"] == [user("hello")]
    assert (call.request["max_tokens"], call.stream, call.texts.user) == (64, False, "hello")


def test_settings_are_chats() -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    fields = {"max_output_tokens": 20, "temperature": 0.5, "top_p": 0.9, "reasoning": {"effort": "low"}}
    request = asked(ask(text={"format": form, "verbosity": "low"}, **fields, seed=7, top_k=5))
    assert (request["max_tokens"], request["temperature"], request["top_p"], request["top_k"]) == (20, 0.5, 0.9, 5)
    assert (request["seed"], request["reasoning_effort"]) == (7, "low")
    assert request["response_format"]["json_schema"] == {"name": "n", "schema": SCHEMA, "strict": True}
    assert asked(ask(text={"format": {"type": "json_object"}}))["response_format"] == {"type": "json_object"}
    assert "response_format" not in asked(ask(text={"format": {"type": "text"}}))


def test_the_engine_is_asked_for_nothing_that_it_does_not_know() -> None:
    fields = {"store": True, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "truncation": "auto"}
    unknown = {"client_metadata": {"x": "y"}, "prompt_cache_key": "k", "service_tier": "auto", "kv_transfer_params": {}}
    plain, full = asked(ask()), asked(ask(**fields, **unknown, user="u", background=False, previous_response_id=None))
    assert full == plain


@pytest.mark.parametrize("field", ["conversation", "prompt", "background"])
def test_what_would_change_the_answer_is_refused_with_what_to_do(field: str) -> None:
    with pytest.raises(BadRequest, match=f"{field} is not supported: .*(send|leave)"):
        ask(**{field: True})


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": []},
        {"input": 5},
        {"instructions": ["a"]},
        {"max_output_tokens": 0},
        {"max_output_tokens": "many"},
        {"reasoning": "low"},
        {"text": {"format": "json"}},
        {"temperature": "hot"},
        {"stream": "yes"},
    ],
)
def test_fields_of_the_wrong_type_are_refused(fields: Json) -> None:
    with pytest.raises(BadRequest):
        RESPONSES.read(json.dumps({"model": "m", "input": "hello", **fields}).encode(), AROUND)


def test_a_request_that_is_nested_too_deeply_is_refused() -> None:
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    with pytest.raises(BadRequest, match="the request cannot be read"):
        RESPONSES.read(b'{"model":"m","input":"hello","metadata":' + deep + b"}", AROUND)


def test_a_response_repeats_the_settings_that_were_in_force() -> None:
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "tools": [{"type": "web_search"}], "store": True}
    told = answered(ask(**fields, max_output_tokens=9), {"content": "hi"})
    assert {name: told[name] for name in ("instructions", "metadata", "tools", "max_output_tokens")} == {
        **{name: fields[name] for name in ("instructions", "metadata", "tools")},
        "max_output_tokens": 9,
    }
    assert (told["model"], told["temperature"], told["store"], told["previous_response_id"]) == (
        "tiny",
        1.0,
        True,
        None,
    )


def test_what_a_call_adds_is_stored_unless_the_client_does_without() -> None:
    part = ask(user(), instructions="Be brief.").part
    assert part is not None
    assert (part.instructions, part.messages) == ([{"role": "system", "content": "Be brief."}], [user()])
    assert ask(user(), store=False).part is None
    assert ask(user(), said("hi"), user()).part is None, "it sends the conversation itself"
    assert ask(user("a" * LARGEST_STORED)).part is None
    previous = SEAL.attach("resp", ONE)
    continued = ask(returned(1), previous_response_id=previous).part
    assert continued is not None
    assert (continued.after, continued.is_stored) == (ONE, True)
    forgotten = ask(user(), previous_response_id=previous, store=False).part
    assert forgotten is not None
    assert (forgotten.after, forgotten.is_stored) == (ONE, False)


@pytest.mark.parametrize("previous", ["resp_1", 5, ""])
def test_an_id_of_another_server_is_unknown(previous: Any) -> None:
    with pytest.raises(PreviousResponseNotFound, match="send the whole input instead"):
        ask(user(), previous_response_id=previous)


def test_the_token_count_has_its_details() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}
    told = answered(ask(), {"content": "hi"}, usage={**usage, "completion_tokens_details": {"reasoning_tokens": 2}})
    assert told["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert answered(ask(), {"content": "hi"})["usage"]["total_tokens"] == 7, "the gateway's own count"


@pytest.mark.parametrize(
    ("finish_reason", "status", "reason"),
    [("length", "incomplete", "max_output_tokens"), ("content_filter", "incomplete", "content_filter")],
)
def test_an_answer_that_was_cut_off_is_incomplete(finish_reason: str, status: str, reason: str) -> None:
    told = answered(ask(), {"reasoning": "hm", "content": "hi"}, finish_reason)
    assert (told["status"], told["incomplete_details"]) == (status, {"reason": reason})
    assert [item["status"] for item in told["output"]] == ["completed", "incomplete"]


def test_an_answer_without_anything_is_an_empty_text() -> None:
    (item,) = answered(ask(), {"content": None})["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_every_id_that_a_client_may_send_back_proves_the_step() -> None:
    call = ask(tools=[{"type": "custom", "name": "patch"}])
    function = {"name": "patch", "arguments": '{"input": "x"}'}
    message = {"content": "hi", "reasoning": "hm", "tool_calls": [{"id": "c1", "function": function}]}
    told = answered(call, message, "tool_calls")
    reasoning, _, custom = told["output"]
    ids = [told["id"], *(item["id"] for item in told["output"]), custom["call_id"], reasoning["encrypted_content"]]
    assert {SEAL.opened(text) for text in ids} == {call.uid}
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("arguments", ["", "ls", '{"command": "ls"}', '{"command": []}', '{"command": [1]}', "[1]"])
def test_a_command_that_cannot_be_read_is_no_shell_call(arguments: str) -> None:
    call = ask(tools=[{"type": "local_shell"}])
    function = {"name": "local_shell", "arguments": arguments}
    (item,) = answered(call, {"tool_calls": [{"id": "c1", "function": function}]}, "tool_calls")["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "local_shell", arguments)


def test_a_call_of_a_function_that_nobody_offered_is_passed_on() -> None:
    function = {"name": "g", "arguments": "{}"}
    (item,) = answered(ask(), {"tool_calls": [{"function": function}]}, "tool_calls")["output"]
    assert (item["type"], item["name"], SEAL.detach(item["call_id"])[0]) == ("function_call", "g", "call_0")


def test_a_schema_of_the_request_is_valid_json() -> None:
    assert set(orjson.loads(orjson.dumps(RESPONSES.request_schema))["required"]) == {"model", "input"}
