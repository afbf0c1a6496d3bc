import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from rig.chatml import render_chat
from rig.tiny_model import make_tiny_model
from rig.vocabulary import VOCABULARY_SIZE, encode, pieces

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Ajouter, è", "parameters": {"type": "object"}}}
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + é?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "no sum"},
    {"role": "assistant", "content": "None."},
    {"role": "user", "content": "Pity."},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second = make_tiny_model(tmp_path / "a", seed=5), make_tiny_model(tmp_path / "b", seed=5)
    assert files(first) == files(second)


def test_another_seed_changes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    first, second = files(make_tiny_model(tmp_path / "a", seed=0)), files(make_tiny_model(tmp_path / "b", seed=1))
    assert [name for name in first if first[name] != second[name]] == ["model.safetensors"]


def test_another_seed_changes_every_tensor(tmp_path: Path) -> None:
    first, second = (load_file(make_tiny_model(tmp_path / str(s), seed=s) / "model.safetensors") for s in (0, 1))
    assert first.keys() == second.keys()
    assert not any(np.array_equal(first[name], second[name]) for name in first)


def test_no_layer_writes_to_the_dimension_that_keeps_padded_ids_unlikely(tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    assert (embedding[:VOCABULARY_SIZE, 0] > 0).all()
    assert (embedding[VOCABULARY_SIZE:, 0] < -10).all()
    assert weights["model.norm.weight"][0] > 0
    writers = [name for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(writers) == 4
    assert not any(weights[name][0].any() for name in writers)


def test_the_tokenizer_has_the_rigs_vocabulary(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCABULARY_SIZE == 267
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    "text", ["plain", "naïve 🐘 日本 \x00\r\n\t", "<tool_call>{}</tool_call><think>", " two  spaces "]
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert encode(text) == ids
    assert "".join(pieces(ids)) == text


def test_every_byte_is_its_own_id(tokenizer: Any) -> None:
    assert tokenizer.encode("é") == list("é".encode())


def test_a_decomposed_letter_is_composed(tokenizer: Any) -> None:
    assert tokenizer.encode("e\u0301") == encode("e\u0301") == list("é".encode())


def test_control_tokens_are_no_text(tokenizer: Any) -> None:
    ids = encode("<|im_start|>a<tool_call><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(pieces(ids)) == "a<tool_call>"


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:], CONVERSATION[1:2]])
def test_the_template_and_its_python_twin_agree(tokenizer: Any, messages: Any, tools: Any) -> None:
    templated = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert templated == render_chat(messages, tools)


def test_the_template_shows_tools_and_calls(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>' in text
    assert text.count('<tool_call>{"name": "add"') == 2
    assert "<|im_start|>tool\n<tool_response>no sum</tool_response><|im_end|>" in text


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_longer_conversation_begins_as_the_shorter_one(tools: Any) -> None:
    assert render_chat(CONVERSATION, tools).startswith(render_chat(CONVERSATION[:2], tools))


def test_control_tokens_of_other_templates_come_after_the_vocabulary(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, control_tokens=["<|eot_id|>", "[INST]"], eos_token="<|eot_id|>")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a<|eot_id|>[INST]").input_ids == [ord("a"), VOCABULARY_SIZE, VOCABULARY_SIZE + 1]
    assert tokenizer.eos_token_id == VOCABULARY_SIZE
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert [row[0] > 0 for row in rows[VOCABULARY_SIZE : VOCABULARY_SIZE + 3]] == [True, True, False]
