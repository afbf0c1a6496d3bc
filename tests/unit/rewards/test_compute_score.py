"""Functions with the signature of verl's and Claw-R1's custom reward functions."""

from pathlib import Path
from typing import Any

import pytest

from stepwell.pool.api.scoring import Score
from stepwell.rewards.function import as_score
from stepwell.rewards.loading import load
from tests.unit.rewards.samples import sample

FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "acc": True, "pred": solution_str, "of": [data_source, ground_truth, extra_info]}

async def later(solution_str, ground_truth):
    return float(ground_truth)

def of_arrays(solution_str, ground_truth):
    import numpy as np

    return {"score": np.float32(0.5), "acc": np.bool_(True), "length": np.float32(3), "mean_of_none": np.float64("nan")}

def lost(solution_str, ground_truth, **more):
    return {"acc": 1.0}
"""
FIELDS: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 3},
}

ANSWERED = sample(metadata=FIELDS).decoded_by(lambda _: "It is 72.")


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


def test_it_gets_what_the_dataset_says_and_the_models_text(functions: str) -> None:
    score = load(f"{functions}:compute_score").call(ANSWERED)
    assert isinstance(score, Score)
    assert (score.value, score.parts) == (0.5, {"acc": 1.0})
    assert '"pred":"It is 72."' in score.notes
    assert '["openai/gsm8k","72",{"index":3,"num_turns":1}]' in score.notes


def test_a_part_that_is_no_finite_number_costs_no_score(functions: str) -> None:
    told: Any = load(f"{functions}:of_arrays").call(ANSWERED)
    score = as_score(told, steps=1)
    assert (score.value, score.parts) == (0.5, {"acc": 1.0, "length": 3.0})
    assert "mean_of_none" in score.notes


async def test_a_coroutine_gets_no_more_than_it_names(functions: str) -> None:
    function = load(f"{functions}:later")
    assert function.is_async
    assert await function.call(ANSWERED) == 72.0  # type: ignore[misc]


def test_a_sample_without_an_answer_and_an_answer_without_a_score_are_told(functions: str) -> None:
    with pytest.raises(ValueError, match="no reward_model with a ground_truth"):
        load(f"{functions}:compute_score").call(sample(metadata={"data_source": "x"}))
    with pytest.raises(ValueError, match="without 'score': acc"):
        load(f"{functions}:lost").call(ANSWERED)
