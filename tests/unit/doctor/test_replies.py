import pytest

from stepwell.doctor.replies import ParsedReply, ToolCall, parse_reply
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
