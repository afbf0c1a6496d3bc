import random
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from stepwell.demo.model import (
    CHAT_TEMPLATE,
    END_OF_TURN,
    PADDED_SIZE,
    ScriptTurn,
    make_tokenizer,
    write_tokenizer,
)
from stepwell.demo.tasks import TASKS

CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "12+34"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "calc", "arguments": {"x": "12+34"}}}],
    },
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": "46"},
]


def render(messages: list[dict[str, Any]], *, is_open: bool) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=is_open)


def test_the_warm_up_shows_a_conversation_as_the_template_writes_it() -> None:
    sample = {"sum": "12+34", "result": "46"}
    shown = next(
        turns
        for seed in range(100)
        if len(turns := TASKS["tool"].shown(sample, random.Random(seed))) == 4 and turns[-1].text == "46"
    )

    assert "".join(turn.opening + turn.content for turn in shown) == render(CALLED, is_open=False)


def test_a_prompt_is_a_prefix_of_the_prompt_of_its_continuation() -> None:
    encode = make_tokenizer().encode
    first = encode(render(CALLED[:1], is_open=True)).ids
    second = encode(render(CALLED[:3], is_open=True)).ids
    written = encode('<tool_call>{"name": "calc", "arguments": {"x": "12+34"}}</tool_call><|im_end|>').ids

    assert second[: len(first) + len(written)] == first + written


@pytest.mark.parametrize("text", ["abc", "Grüße, 世界 🙂", '{"name": "calc"}', "<tool_call></tool_call>", "a\nb"])
def test_a_text_is_decoded_unchanged(text: str) -> None:
    tokenizer = make_tokenizer()

    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text


def test_every_id_has_a_row_in_the_embedding() -> None:
    assert make_tokenizer().get_vocab_size() <= PADDED_SIZE


def test_transformers_reads_the_folder_as_the_same_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    ids = read.apply_chat_template(CALLED[:1], add_generation_prompt=True, return_dict=False)

    assert ids == make_tokenizer().encode(render(CALLED[:1], is_open=True)).ids
    assert read.eos_token_id == END_OF_TURN


def test_a_turn_has_an_opening_and_a_content() -> None:
    turn = ScriptTurn("user", "abc")

    assert (turn.opening, turn.content) == ("<|im_start|>user\n", "abc<|im_end|>")
