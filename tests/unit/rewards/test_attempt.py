from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stepwell.pool.api.scoring import Attempt, JudgementOutcome, Score
from stepwell.rewards.function import attempt_of, read_attempt, write_attempt


@pytest.mark.parametrize("given", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), Score(1.0)])
def test_every_real_number_is_a_score(given: object) -> None:
    attempt = attempt_of(given, 1, 0.5)
    assert attempt == Attempt(JudgementOutcome.SCORE, Score(1.0), seconds=0.5)
    assert attempt.score is not None
    assert type(attempt.score.value) is float


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "it returned None; is a return statement missing?"),
        ("1", "it returned a str ('1')"),
        (Decimal(1), "it returned a Decimal"),
        ([1.0], "it returned a list"),
        (float("nan"), "it returned nan"),
        (float("-inf"), "it returned -inf"),
        (10**400, "it returned inf"),
        (Score(float("nan")), "it returned nan"),
        (Score(1.0, {"a": "b"}), "as part 'a' it returned a str"),  # type: ignore[dict-item]
        (Score(1.0, [1.0]), "the parts of its Score are a list"),  # type: ignore[arg-type]
        (Score(1.0, step_rewards=(0.0, float("nan"))), "for step 1 it returned nan"),
        (Score(1.0, step_rewards=(0.0,)), "it returned 1 step rewards for a trajectory of 2 steps"),
    ],
)
def test_anything_else_is_an_error_that_says_what_came(given: Any, words: str) -> None:
    attempt = attempt_of(given, 2, 0.0)
    assert (attempt.outcome, attempt.score) == (JudgementOutcome.ERROR, None)
    assert attempt.why.startswith(words)


@pytest.mark.parametrize(
    "attempt",
    [
        Attempt(JudgementOutcome.SCORE, Score(0.1, {"a": 1.0}, (None, 0.25), "fine"), seconds=0.125),
        Attempt(JudgementOutcome.ERROR, why="ValueError: é"),
        Attempt(JudgementOutcome.TIMEOUT, why="slow", seconds=3.0),
    ],
)
def test_an_attempt_travels_whole(attempt: Attempt) -> None:
    assert read_attempt(write_attempt(7, attempt, is_leaving=True)) == (7, attempt, True)
