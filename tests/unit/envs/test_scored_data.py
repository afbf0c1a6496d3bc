import math
from typing import Any

import numpy as np
import pytest

from stepwell.envs.scored_data import ScoredDataGroup, ScoredDataItem, gather, group_fault, without_empty_lists
from stepwell.errors import BadRequest


def rollout(**more: object) -> ScoredDataItem:
    return {"tokens": [1, 2], "masks": [-100, 2], "scores": 0.5, **more}  # type: ignore[typeddict-item]


def test_every_key_of_the_rollouts_is_gathered() -> None:
    each = {
        "inference_logprobs": [1.0, -0.5],
        "policy_version": 3,
        "exactness": "engine",
        "messages": [{"role": "user", "content": "?"}],
        "advantages": [0.0, 1.0],
        "ref_logprobs": [0.0, -1.0],
        "overrides": {"set_advantage_to_zero": True},
        "images": "picture",
        "distill_token_ids": [[1], [2]],
        "distill_logprobs": [[-1.0], [-2.0]],
    }
    group = gather([rollout(**each), rollout(**each)])
    assert group["tokens"] == [[1, 2], [1, 2]]
    assert group["scores"] == [0.5, 0.5]
    assert group["policy_versions"] == [3, 3]
    for key in each.keys() - {"policy_version"}:
        assert group[key] == [each[key], each[key]]  # type: ignore[literal-required]


def test_keys_of_groups_are_laid_over_one_another() -> None:
    group = gather([rollout(group_overrides={"a": 1, "b": 1}), rollout(), rollout(group_overrides={"b": 2})])
    assert group["group_overrides"] == {"a": 1, "b": 2}


def test_a_rollout_that_lacks_what_others_have_gets_something_harmless() -> None:
    group = gather(
        [rollout(overrides={"x": 1}, messages=[{"role": "user"}], exactness="engine", policy_version=3), rollout()]
    )
    assert group["overrides"] == [{"x": 1}, {}]
    assert group["messages"] == [[{"role": "user"}], []]
    assert group["exactness"] == ["engine", "submitted"]
    assert group["policy_versions"] == [3, None]


def test_nothing_stands_for_numbers_a_trainer_would_compute_with() -> None:
    with pytest.raises(BadRequest, match="some rollouts of the group have inference_logprobs and others have none"):
        gather([rollout(inference_logprobs=[1.0, -0.5]), rollout()])


def test_a_key_that_no_rollout_has_is_left_out() -> None:
    assert gather([rollout(advantages=None), rollout()]).keys() == {"tokens", "masks", "scores"}


def fault(may_be_equal: bool = False, **more: Any) -> tuple[str, str] | None:
    group: ScoredDataGroup = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [0.0, 1.0]}
    group.update(more)  # type: ignore[typeddict-item]
    return group_fault(group, group_size=2, max_length=2, may_be_equal=may_be_equal)


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
    assert found == ("too long", "a rollout has 3 tokens; the trainer accepts 2")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"masks": None}, "it has no masks"),
        ({"tokens": [], "masks": [], "scores": []}, "it has no rollouts"),
        ({"scores": [1.0]}, "the numbers of tokens, masks and scores differ"),
        ({"scores": [1.0, math.nan]}, "its scores are [1.0, nan]"),
        ({"scores": [1.0, None]}, "its scores are [1.0, None]"),
        ({"masks": [[-100], [3]]}, "its masks are not as long as its tokens"),
        ({"inference_logprobs": [[-1.0], [-1.0]]}, "its inference_logprobs are not as long as its tokens"),
    ],
)
def test_what_does_not_add_up_is_malformed(more: dict[str, Any], why: str) -> None:
    assert fault(**more) == ("malformed", why)


def test_an_empty_list_is_as_if_it_were_not_given() -> None:
    group: Any = {"tokens": [[1]], "masks": [[1]], "scores": [1.0], "advantages": [], "images": [], "overrides": [{}]}
    without_empty_lists(group)
    assert set(group) == {"tokens", "masks", "scores", "overrides"}


def test_a_number_for_each_rollout_is_no_list_of_advantages() -> None:
    group: Any = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [0.0, 1.0], "advantages": [1, 1]}
    fault = group_fault(group, group_size=2, max_length=None, may_be_equal=True)
    assert fault == ("malformed", "its advantages are not as long as its tokens")
