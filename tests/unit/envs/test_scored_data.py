import pytest

from stepwell.envs.scored_data import ScoredDataItem, gather
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
