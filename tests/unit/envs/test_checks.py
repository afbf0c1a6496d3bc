import math
from typing import Any

import numpy as np
import pytest

from stepwell.envs.checks import fault_of
from stepwell.envs.scored_data import ScoredDataGroup


def fault(may_be_equal: bool = False, **more: Any) -> tuple[str, str] | None:
    group: ScoredDataGroup = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [0.0, 1.0]}
    group.update(more)  # type: ignore[typeddict-item]
    return fault_of(group, group_size=2, max_length=2, may_be_equal=may_be_equal)


def test_a_sound_group_has_no_fault() -> None:
    assert fault() is None
    assert fault(tokens=[np.array([1, 2]), np.array([3])], scores=np.array([0.0, 1.0])) is None


def test_equal_scores_are_a_fault_unless_they_may_be() -> None:
    assert fault(scores=[1.0, 1.0]) == ("equal scores", "every score is 1.0")
    assert fault(scores=[1.0, 1.0], may_be_equal=True) is None


def test_a_group_says_its_own_size_by_an_override() -> None:
    assert fault(group_overrides={"group_size": 3}) == ("wrong size", "2 rollouts instead of 3")
    assert fault(tokens=[[1]], masks=[[1]], scores=[1.0], group_overrides={"group_size": 1}, may_be_equal=True) is None


def test_a_sequence_may_be_as_long_as_the_trainer_says_and_no_longer() -> None:
    found = fault(tokens=[[1, 2, 3], [3]], masks=[[1, 2, 3], [3]])
    assert found == ("too long", "a rollout has 3 tokens; the trainer takes 2")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"masks": None}, "it has no masks"),
        ({"tokens": [], "masks": [], "scores": []}, "it has no rollouts"),
        ({"scores": [1.0]}, "tokens, masks and scores are not equally many"),
        ({"scores": [1.0, math.nan]}, "its scores are [1.0, nan]"),
        ({"scores": [1.0, None]}, "its scores are [1.0, None]"),
        ({"masks": [[-100], [3]]}, "its masks are not as long as its tokens"),
        ({"inference_logprobs": [[-1.0], [-1.0]]}, "its inference_logprobs are not as long as its tokens"),
    ],
)
def test_what_does_not_add_up_is_malformed(more: dict[str, Any], why: str) -> None:
    assert fault(**more) == ("malformed", why)
