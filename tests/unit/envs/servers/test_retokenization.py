"""Text encoded again, with the tiny model's own tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from rig.chatml import render_chat
from rig.vocabulary import END_OF_TURN, encode
from stepwell.common.tokenizers import load_tokenizer
from stepwell.envs.servers.sequences import TokenizerCache, encoded_turn
from stepwell.errors import BadRequest, EngineUnavailable

USER = {"role": "user", "content": "hello"}
ASKED: dict[str, Any] = {"messages": [USER]}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def chosen(finish_reason: str = "stop", logprobs: int | None = None, **message: Any) -> dict[str, Any]:
    told = None if logprobs is None else {"content": [{"logprob": -0.5}] * logprobs}
    return {"message": {"role": "assistant", **message}, "finish_reason": finish_reason, "logprobs": told}


def test_text_is_encoded_as_it_is_and_ends_as_it_was_sampled(tokenizer: Any) -> None:
    turn = encoded_turn(tokenizer, ASKED, chosen(content="hi"), 0)
    assert turn.prompt_ids.tolist() == encode(render_chat([USER]))
    assert turn.response_ids.tolist() == [*encode("hi"), END_OF_TURN]
    assert (turn.logprobs, turn.exactness) == (None, "retokenized")


def test_an_answer_that_was_cut_off_has_no_end(tokenizer: Any) -> None:
    turn = encoded_turn(tokenizer, ASKED, chosen("length", content="hi"), 0)
    assert turn.response_ids.tolist() == encode("hi")


def test_an_end_is_not_made_up_where_the_logprobs_have_none(tokenizer: Any) -> None:
    turn = encoded_turn(tokenizer, ASKED, chosen(content="hi", logprobs=2), 0)
    assert turn.response_ids.tolist() == encode("hi")
    assert turn.logprobs is not None
    assert len(encoded_turn(tokenizer, ASKED, chosen(content="hi", logprobs=3), 0).response_ids) == 3


def test_logprobs_of_another_count_are_left_out(tokenizer: Any) -> None:
    turn = encoded_turn(tokenizer, ASKED, chosen(content="hi", logprobs=7), 0)
    assert turn.logprobs is None
    assert turn.response_ids.tolist() == [*encode("hi"), END_OF_TURN]


def test_tool_calls_are_encoded_as_the_template_shows_them(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = {"messages": [USER], "tools": tools}
    turn = encoded_turn(tokenizer, asked, chosen("tool_calls", content="So: ", tool_calls=[CALL]), 0)
    assert turn.prompt_ids.tolist() == encode(render_chat([USER], tools))
    written = 'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert turn.response_ids.tolist() == [*encode(written), END_OF_TURN]


def test_the_next_turn_of_a_tool_conversation_extends_the_first(tokenizer: Any) -> None:
    first = encoded_turn(tokenizer, ASKED, chosen("tool_calls", content=None, tool_calls=[CALL]), 0)
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    history = [USER, called, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    second = encoded_turn(tokenizer, {"messages": history}, chosen(content="one"), 0)
    so_far = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(so_far)] == so_far


def test_each_completion_has_the_prompt_that_it_answers(tokenizer: Any) -> None:
    asked = {"prompt": ["one", "two"], "n": 2}
    prompts = [encoded_turn(tokenizer, asked, {"text": "!", "finish_reason": "stop"}, i).prompt_ids for i in range(4)]
    assert [bytes(ids.tolist()) for ids in prompts] == [b"one", b"one", b"two", b"two"]
    assert encoded_turn(tokenizer, {"prompt": [7, 8]}, {"text": "!"}, 0).prompt_ids.tolist() == [7, 8]


def test_a_chat_that_the_template_refuses_is_no_turn(tokenizer: Any) -> None:
    broken = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{no json"}}
    with pytest.raises(EngineUnavailable, match="cannot be encoded again"):
        encoded_turn(tokenizer, ASKED, chosen("tool_calls", tool_calls=[broken]), 0)


async def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="none: .*tokenizer_name"):
        await TokenizerCache().named(str(tmp_path / "none"))
