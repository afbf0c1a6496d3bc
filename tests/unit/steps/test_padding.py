import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.builders import make_step
from stepwell.errors import BadRequest
from stepwell.steps.columns import pack
from stepwell.steps.padding import Overlong, PaddedSteps, pad_steps
from stepwell.steps.step import Step, logprobs_array, mask_array

PAD = 99


def pad(steps: list[Step], prompt: int, response: int, overlong: Overlong = "raise") -> PaddedSteps:
    return pad_steps(pack(steps), prompt, response, pad_id=PAD, overlong=overlong)


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    padded = pad([make_step(prompt_ids=[1, 2], response_ids=[3, 4]), make_step(prompt_ids=[5], response_ids=[6])], 3, 4)
    assert padded.prompts_S_P.tolist() == [[PAD, 1, 2], [PAD, PAD, 5]]
    assert padded.responses_S_R.tolist() == [[3, 4, PAD, PAD], [6, PAD, PAD, PAD]]
    assert padded.input_ids_S_T.tolist() == [[PAD, 1, 2, 3, 4, PAD, PAD], [PAD, PAD, 5, 6, PAD, PAD, PAD]]
    assert padded.attention_mask_S_T.tolist() == [[0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert padded.position_ids_S_T.tolist() == [[0, 0, 1, 2, 3, 3, 3], [0, 0, 0, 1, 1, 1, 1]]


def test_only_trained_tokens_are_in_the_response_mask() -> None:
    padded = pad([make_step(response_ids=[3, 4, 5], response_mask=mask_array([True, False, True]))], 2, 4)
    assert padded.response_mask_S_R.tolist() == [[1, 0, 1, 0]]


def test_the_reward_stands_on_the_last_response_token() -> None:
    padded = pad([make_step(response_ids=[3, 4], reward=0.5), make_step(response_ids=[3, 4, 5, 6], reward=-1.0)], 2, 4)
    assert padded.token_level_rewards_S_R.tolist() == [[0, 0.5, 0, 0], [0, 0, 0, -1]]


def test_an_unscored_step_can_be_told_from_one_scored_0() -> None:
    padded = pad([make_step(reward=0.0), make_step(reward=None)], 2, 2)
    assert not padded.token_level_rewards_S_R.any()
    assert padded.scored_S.tolist() == [True, False]


def test_missing_logprobs_are_flagged_and_leave_no_nan() -> None:
    steps = [make_step(response_logprobs=logprobs_array([-1, -2])), make_step(response_logprobs=None)]
    padded = pad(steps, 2, 3)
    assert padded.rollout_log_probs_S_R.tolist() == [[-1, -2, 0], [0, 0, 0]]
    assert padded.has_logprobs_S.tolist() == [True, False]


def test_a_step_that_is_too_long_is_never_cut_in_silence() -> None:
    steps = [make_step(prompt_ids=range(7)), make_step(prompt_ids=range(5)), make_step(response_ids=range(9))]
    with pytest.raises(BadRequest) as refusal:
        pad(steps, 4, 8)
    assert "2 of 3 prompts are longer than 4 tokens, the longest has 7" in str(refusal.value)
    assert "1 of 3 responses are longer than 8 tokens, the longest has 9" in str(refusal.value)


def test_dropped_steps_can_be_told_from_the_rows() -> None:
    steps = [
        make_step("a", prompt_ids=range(7)),
        make_step("b", step_index=4, policy_version=7, temperature=0.7),
        make_step("c", response_ids=range(9)),
        make_step("d", prompt_uid="q", reward=1.0),
    ]
    padded = pad(steps, 4, 8, overlong="drop")
    assert padded.kept_S.tolist() == [1, 3]
    assert padded.trajectory_uids == ["b", "d"]
    assert padded.prompt_uids == ["p", "q"]
    assert padded.step_indexes_S.tolist() == [4, -1]
    assert padded.policy_versions_S.tolist() == [7, 0]
    assert padded.temperatures_S.tolist() == pytest.approx([0.7, 0.0]), "0 is not known"
    assert padded.scored_S.tolist() == [False, True]
    assert padded.prompts_S_P.tolist() == [[PAD, PAD, 1, 2]] * 2


def test_all_steps_may_be_dropped() -> None:
    assert pad([make_step()], 1, 1, overlong="drop").input_ids_S_T.shape == (0, 2)


lengths = st.integers(1, 5)


@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=6), st.integers(5, 7), st.integers(5, 7))
def test_what_is_not_padding_is_the_step(sizes: list[tuple[int, int]], prompt: int, response: int) -> None:
    steps = [make_step(prompt_ids=range(p), response_ids=range(10, 10 + r)) for p, r in sizes]
    padded = pad(steps, prompt, response)
    for step, ids, real in zip(steps, padded.input_ids_S_T, padded.attention_mask_S_T, strict=True):
        assert ids[real == 1].tolist() == [*step.prompt_ids, *step.response_ids]
        assert (ids[real == 0] == PAD).all()
    counted = np.clip(np.cumsum(padded.attention_mask_S_T, axis=1) - 1, 0, None)
    assert (padded.position_ids_S_T == counted).all()
