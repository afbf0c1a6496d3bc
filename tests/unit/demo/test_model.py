from pathlib import Path

import torch
from safetensors.torch import load_file

from stepwell.demo import model
from stepwell.demo.model import END_OF_TURN, ScriptTurn, make_model, make_tokenizer, write_model
from stepwell.demo.tasks import TASKS, shown, split


def test_only_the_assistants_tokens_and_its_end_of_turn_have_labels() -> None:
    ids, labels = model.row(make_tokenizer(), [ScriptTurn("user", "ab"), ScriptTurn("assistant", "ba")])

    learned = [token for token, label in zip(ids, labels, strict=True) if label != model.IGNORED]
    assert learned == [*b"ba", END_OF_TURN]
    assert [label for label in labels if label != model.IGNORED] == learned
    assert labels[-3:] == learned


def test_the_rate_rises_and_then_falls_to_a_tenth() -> None:
    shares = [model.rate_factor(step, model.STEPS) for step in range(model.STEPS)]

    assert shares[0] < 0.1 < 0.9 < max(shares)
    assert 0.1 <= shares[-1] < 0.11


def test_a_warm_up_lowers_the_loss() -> None:
    task = TASKS["rev"]
    samples, _ = split(task, 0)
    short = model.warm_up(make_model(0), shown(task, samples, 0), steps=2)
    longer = model.warm_up(make_model(0), shown(task, samples, 0), steps=12)

    assert longer < short


def test_the_same_seed_gives_the_same_model() -> None:
    first, again, other = (make_model(seed).state_dict() for seed in (1, 1, 2))

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_folder_has_the_weights_once_under_the_name_that_vllm_ties(tmp_path: Path) -> None:
    names = load_file(write_model(make_model(0), tmp_path) / "model.safetensors").keys()

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
