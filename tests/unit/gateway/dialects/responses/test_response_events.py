import json
from typing import Any

import pytest
from stepwell.gateway.error_responses import describe

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.dialect import StreamWriter
from stepwell.wire.openai import NO_USAGE, Usage
from tests.unit.gateway.dialects.responses.asking_responses import RESPONSES, Json, ask

TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}, {"type": "local_shell"}]


def stream() -> StreamWriter:
    return RESPONSES.stream(ask(stream=True, tools=TOOLS))


def chunk(finish_reason: str | None = None, **delta: Any) -> Json:
    return {"model": "tiny", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def call(index: int, **fields: Any) -> Json:
    return chunk(tool_calls=[{"index": index, **fields}])


def events(data: bytes) -> list[Json]:
    return [json.loads(event.split("\ndata: ", 1)[1]) for event in data.decode().split("\n\n") if event]


def names(data: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events(data)]


def test_each_chunk_becomes_its_events_at_once() -> None:
    writer = stream()
    assert names(writer.chunk(chunk(role="assistant", content=""))) == ["created", "in_progress"]
    opened = ["output_item.added", "content_part.added"]
    ended = ["content_part.done", "output_item.done"]
    assert names(writer.chunk(chunk(reasoning="h"))) == [*opened, "reasoning_text.delta"]
    assert names(writer.chunk(chunk(reasoning="m"))) == ["reasoning_text.delta"]
    assert names(writer.chunk(chunk(content="a"))) == ["reasoning_text.done", *ended, *opened, "output_text.delta"]
    assert names(writer.chunk(chunk(content="b"))) == ["output_text.delta"]
    named = writer.chunk(call(0, id="c0", function={"name": "f"}))
    assert names(named) == ["output_text.done", *ended, "output_item.added"]
    assert names(writer.chunk(call(0, function={"arguments": "{}"}))) == ["function_call_arguments.delta"]
    assert names(writer.chunk(chunk("tool_calls"))) == []
    assert names(writer.finish(NO_USAGE)) == ["function_call_arguments.done", "output_item.done", "completed"]


def test_a_custom_tools_input_is_streamed_as_text() -> None:
    writer = stream()
    writer.chunk(call(0, id="c0", function={"name": "patch", "arguments": '{"input": "one'}))
    (delta,) = events(writer.chunk(call(0, function={"arguments": " two\\n three four five"})))
    assert (delta["type"], delta["delta"]) == ("response.custom_tool_call_input.delta", " two\n three four five")
    ended = events(writer.finish(NO_USAGE))
    assert [event["type"] for event in ended[:2]] == [
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert ended[0]["input"] == "one two\n three four five"


def test_a_shell_call_is_sent_when_its_command_is_whole() -> None:
    writer = stream()
    began = writer.chunk(call(0, id="c0", function={"name": "local_shell", "arguments": '{"command": ["l'}))
    assert names(began) == ["created", "in_progress"]
    added, done, _ = events(writer.chunk(call(0, function={"arguments": 's"]}'})) + writer.finish(NO_USAGE))
    assert (added["item"]["status"], done["item"]["status"]) == ("in_progress", "completed")
    assert added["item"]["action"] == done["item"]["action"]
    assert done["item"]["action"]["command"] == ["ls"]


def test_text_after_a_call_is_one_more_item() -> None:
    writer = stream()
    writer.chunk(chunk(content="a"))
    writer.chunk(call(0, id="c0", function={"name": "f", "arguments": "{}"}))
    writer.chunk(chunk(content="b"))
    *_, completed = events(writer.finish(NO_USAGE))
    assert [item["type"] for item in completed["response"]["output"]] == ["message", "function_call", "message"]
    assert len({item["id"] for item in completed["response"]["output"]}) == 3


def test_the_count_of_the_engine_is_in_the_last_event() -> None:
    writer = stream()
    writer.chunk(chunk("length", content="a"))
    writer.chunk({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    last = events(writer.finish(Usage(1, 1)))[-1]
    assert last["type"] == "response.incomplete"
    assert (last["response"]["usage"]["total_tokens"], last["response"]["status"]) == (6, "incomplete")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_failure_is_the_last_event_and_not_the_first(has_begun: bool) -> None:
    writer = stream()
    begun = writer.chunk(chunk(content="a")) if has_begun else b""
    told = events(begun + writer.fail(RESPONSES.error(describe(EngineUnavailable("it broke")))))
    assert (told[0]["type"], told[-1]["type"]) == ("response.created", "response.failed")
    assert told[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert [event["sequence_number"] for event in told] == list(range(len(told)))


def test_a_call_that_goes_on_after_its_end_is_the_engines_fault() -> None:
    writer = stream()
    writer.chunk(call(0, id="c0", function={"name": "f"}))
    writer.chunk(call(1, id="c1", function={"name": "f"}))
    with pytest.raises(EngineUnavailable, match="has ended"):
        writer.chunk(call(0, function={"arguments": "{}"}))


def test_an_answer_without_anything_is_an_empty_text() -> None:
    (item,) = events(stream().finish(NO_USAGE))[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
