import pytest

from stepwell.doctor.replies import MESSAGES, RESPONSES, ParsedReply, ToolCall, parse_reply
from stepwell.errors import EngineUnavailable

CALLED = '{"index": 0, "function": {"name": "flag", "arguments": "{"}}'


def events(*payloads: str) -> str:
    return "".join(f"data: {payload}\n\n" for payload in (*payloads, "[DONE]"))


def test_a_stream_is_assembled_by_choice() -> None:
    body = events(
        '{"choices": [{"index": 1, "delta": {"content": "b"}}]}',
        '{"choices": [{"index": 0, "delta": {"reasoning": "hm", "content": "a"}}]}',
        '{"choices": [{"index": 1, "delta": {"content": "c"}, "finish_reason": "stop"}]}',
    )
    assert parse_reply(": keep-alive\n\n" + body, streamed=True) == (
        ParsedReply("a", "hm"),
        ParsedReply("bc", finish_reason="stop"),
    )


def test_a_tool_call_is_assembled_from_its_pieces() -> None:
    body = events(
        f'{{"choices": [{{"index": 0, "delta": {{"tool_calls": [{CALLED}]}}}}]}}',
        '{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}}]}',
    )
    assert parse_reply(body, streamed=True)[0].tools == [ToolCall("flag", "{}")]


def test_a_whole_answer_and_a_completion_are_parsed() -> None:
    assert (
        parse_reply('{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}', streamed=False)[0].text
        == "a"
    )
    assert parse_reply('{"choices": [{"text": "b"}]}', streamed=False)[0].text == "b"


@pytest.mark.parametrize(
    ("body", "streamed", "words"),
    [
        ('{"error": {"message": "no room"}}', False, "no room"),
        (events('{"error": {"message": "no room"}}'), True, "no room"),
        ("<html>", False, "not JSON"),
        ('data: {"choices": []}\n\n', True, r"without \[DONE\]"),
    ],
)
def test_an_invalid_answer_is_a_failure(body: str, streamed: bool, words: str) -> None:
    with pytest.raises(EngineUnavailable, match=words):
        parse_reply(body, streamed=streamed)


WHOLE_MESSAGE = """{"content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "text", "text": "ab"},
    {"type": "tool_use", "id": "c", "name": "flag", "input": {"up": true}}], "stop_reason": "tool_use"}"""
MESSAGE_EVENTS = (
    '{"type": "content_block_start", "content_block": {"type": "thinking", "thinking": ""}}',
    '{"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}}',
    '{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}',
    '{"type": "ping"}',
    '{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}}',
    '{"type": "content_block_start", "content_block": {"type": "tool_use", "name": "flag", "input": {}}}',
    '{"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{\\"up\\""}}',
    '{"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": ":true}"}}',
    '{"type": "message_delta", "delta": {"stop_reason": "tool_use"}}',
)
WHOLE_RESPONSE = """{"error": null, "status": "completed", "output": [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "content": [{"type": "output_text", "text": "ab"}]},
    {"type": "function_call", "name": "flag", "arguments": "{\\"up\\":true}"}]}"""
RESPONSE_EVENTS = (
    '{"type": "response.created", "response": {"error": null}}',
    '{"type": "response.reasoning_text.delta", "delta": "hm"}',
    '{"type": "response.output_text.delta", "delta": "a"}',
    '{"type": "response.output_text.delta", "delta": "b"}',
    '{"type": "response.output_item.added", "item": {"type": "function_call", "name": "flag"}}',
    '{"type": "response.function_call_arguments.delta", "delta": "{\\"up\\":"}',
    '{"type": "response.function_call_arguments.delta", "delta": "true}"}',
    '{"type": "response.completed", "response": {"error": null, "status": "completed"}}',
)
CALLED_FLAG = ParsedReply("ab", "hm", "tool_calls", [ToolCall("flag", '{"up":true}')])


def stream(payloads: tuple[str, ...]) -> str:
    return "".join(f"event: x\ndata: {payload}\n\n" for payload in payloads)


@pytest.mark.parametrize(
    ("path", "whole", "streamed"),
    [(MESSAGES, WHOLE_MESSAGE, MESSAGE_EVENTS), (RESPONSES, WHOLE_RESPONSE, RESPONSE_EVENTS)],
)
def test_a_dialects_answer_is_the_same_whole_and_streamed(path: str, whole: str, streamed: tuple[str, ...]) -> None:
    assert parse_reply(whole, streamed=False, path=path) == (CALLED_FLAG,)
    assert parse_reply(stream(streamed), streamed=True, path=path) == (CALLED_FLAG,)


def test_a_dialects_answer_that_was_cut_off_has_chats_finish_reason() -> None:
    cut = '{"content": [], "stop_reason": "max_tokens"}', '{"output": [], "status": "incomplete"}'
    replies = [
        parse_reply(body, streamed=False, path=path)[0] for path, body in zip((MESSAGES, RESPONSES), cut, strict=True)
    ]
    assert [reply.finish_reason for reply in replies] == ["length", "length"]


@pytest.mark.parametrize(
    ("path", "body", "streamed", "words"),
    [
        (MESSAGES, '{"type": "error", "error": {"message": "no room"}}', False, "no room"),
        (MESSAGES, stream(('{"type": "error", "error": {"message": "no room"}}',)), True, "no room"),
        (MESSAGES, stream(MESSAGE_EVENTS[:-1]), True, "the stream has no end"),
        (RESPONSES, stream(('{"type": "response.failed", "response": {"error": {"message": "no"}}}',)), True, "no"),
        (RESPONSES, stream(RESPONSE_EVENTS[:-1]), True, "the stream has no end"),
    ],
)
def test_a_dialects_error_and_a_stream_without_an_end_are_failures(
    path: str, body: str, streamed: bool, words: str
) -> None:
    with pytest.raises(EngineUnavailable, match=words):
        parse_reply(body, streamed=streamed, path=path)
