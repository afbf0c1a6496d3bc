"""Which steps share a row, and what the rows then hold (steps/rows.py)."""

from collections import Counter
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.builders import make_step
from stepwell.errors import BadRequest
from stepwell.steps.columns import pack
from stepwell.steps.layout import groups_of, trajectories_of
from stepwell.steps.rows import ForkReason, MergedRows, merge_rows
from stepwell.steps.step import Step, VersionSpan, ids_array, logprobs_array, mask_array


def merge(steps: list[Step], *group_sizes: int) -> MergedRows:
    columns, sizes = pack(steps), ids_array(group_sizes or [len(steps)])
    trajectory_of_S = trajectories_of(columns.trajectory_uids, sizes)
    return merge_rows(columns, trajectory_of_S, groups_of(trajectory_of_S, sizes))


def calls(*prompts_and_responses: tuple[list[int], list[int]], trajectory: str = "t") -> list[Step]:
    return [make_step(trajectory, prompt_ids=prompt, response_ids=reply) for prompt, reply in prompts_and_responses]


def rows(merged: MergedRows, name: str = "tokens") -> list[list[float]]:
    return [part.tolist() for part in np.split(getattr(merged, name), merged.offsets_R[1:-1])]


def step_lists(merged: MergedRows) -> list[list[int]]:
    return [steps.tolist() for steps in merged.steps_of_R]


def test_turns_that_extend_one_another_share_a_row() -> None:
    merged = merge(calls(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6], [7])))
    assert rows(merged) == [[1, 2, 3, 4, 5, 6, 7]]
    assert rows(merged, "loss_mask") == [[0, 0, 1, 0, 1, 1, 1]]
    assert step_lists(merged) == [[0, 1, 2]]
    assert not merged.forks


def test_stripped_thinking_forks_and_loses_no_turn() -> None:
    thought = 9
    merged = merge(calls(([1], [thought, 2]), ([1, 2, 3], [thought, 4]), ([1, 2, 3, 4, 5], [6])))
    assert rows(merged) == [[1, thought, 2], [1, 2, 3, thought, 4], [1, 2, 3, 4, 5, 6]]
    assert merged.loss_mask.sum() == 5
    assert merged.forks == {ForkReason.REPLY_CHANGED: 2}


def test_interleaved_sub_agents_are_told_apart() -> None:
    main = [([1, 1], [10]), ([1, 1, 10, 5], [11]), ([1, 1, 10, 5, 11, 6], [12])]
    helper = [([2], [20]), ([2, 20, 5], [21])]
    merged = merge(calls(main[0], helper[0], main[1], helper[1], main[2]))
    assert step_lists(merged) == [[0, 2, 4], [1, 3]]
    assert merged.forks == {ForkReason.CONTEXT_CHANGED: 1}


def test_a_fork_is_explained_by_the_row_it_has_most_in_common_with() -> None:
    merged = merge(calls(([1, 2], [3, 4]), ([1, 9], [5]), ([1, 2, 4], [6])))
    assert merged.forks == {ForkReason.CONTEXT_CHANGED: 1, ForkReason.REPLY_CHANGED: 1}


def test_compaction_forks() -> None:
    merged = merge(calls(([1, 2, 3], [4]), ([1, 7], [8]), ([1, 7, 8, 9], [10])))
    assert step_lists(merged) == [[0], [1, 2]]
    assert merged.forks == {ForkReason.CONTEXT_CHANGED: 1}


def test_a_call_made_again_is_a_row_of_its_own() -> None:
    merged = merge(calls(([1, 2], [3]), ([1, 2], [3]), ([1, 2, 3], [4])))
    assert rows(merged) == [[1, 2, 3], [1, 2, 3, 4]]
    assert merged.forks == {ForkReason.REPEATED: 1}


def test_going_back_to_an_earlier_turn_forks_from_there() -> None:
    merged = merge(calls(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6])))
    assert step_lists(merged) == [[0, 1], [2]]
    assert rows(merged, "loss_mask") == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert merged.forks == {ForkReason.CONTEXT_CHANGED: 1}


def test_the_longest_of_several_matching_rows_is_extended() -> None:
    merged = merge(calls(([1, 2], [3]), ([1], [2]), ([1, 2, 3, 4], [5])))
    assert step_lists(merged) == [[0, 2], [1]]


def test_rows_never_cross_trajectories_or_groups() -> None:
    one, two = ([1], [2]), ([1, 2, 3], [4])
    assert len(merge([*calls(one, trajectory="a"), *calls(two, trajectory="b")])) == 2
    merged = merge([*calls(one), *calls(two)], 1, 1)
    assert merged.trajectory_of_R.tolist() == [0, 1]
    assert merged.group_of_R.tolist() == [0, 1]


def test_untrained_response_tokens_stay_untrained() -> None:
    step = make_step(prompt_ids=[1], response_ids=[2, 3, 4], response_mask=mask_array([True, False, True]))
    assert rows(merge([step]), "loss_mask") == [[0, 1, 0, 1]]


def test_logprobs_stand_at_their_tokens_and_missing_ones_are_flagged() -> None:
    steps = [
        make_step(prompt_ids=[1], response_ids=[2], response_logprobs=logprobs_array([-1])),
        make_step(prompt_ids=[1, 2, 3], response_ids=[4, 5], response_logprobs=logprobs_array([-2, -3])),
        make_step(prompt_ids=[9], response_ids=[4], response_logprobs=logprobs_array([-4])),
        make_step(prompt_ids=[9, 4], response_ids=[5], response_logprobs=None),
    ]
    merged = merge(steps)
    assert rows(merged, "logprobs") == [[0, -1, 0, -2, -3], [0, -4, 0]]
    assert merged.has_logprobs_R.tolist() == [True, False]


def test_each_token_has_the_version_that_wrote_it() -> None:
    steps = [
        make_step(prompt_ids=[1], response_ids=[2], policy_version=3),
        make_step(
            prompt_ids=[1, 2, 3],
            response_ids=[4, 5, 6],
            policy_version=4,
            version_spans=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)),
        ),
    ]
    assert rows(merge(steps), "versions") == [[-1, 3, -1, 4, 5, 5]]


def test_rows_carry_the_rollouts_return_and_share_its_weight_by_trained_tokens() -> None:
    forked = [
        make_step(prompt_ids=[1], response_ids=[2, 3, 4], reward=0.5),
        make_step(prompt_ids=[9], response_ids=[5], reward=0.25),
    ]
    merged = merge([*forked, make_step("unscored")])
    assert merged.rewards_R[:2].tolist() == [0.75, 0.75]
    assert np.isnan(merged.rewards_R[2])
    assert merged.weights_R.tolist() == [0.75, 0.25, 1.0]


def test_a_rollout_in_which_nothing_is_trained_weighs_nothing() -> None:
    merged = merge([make_step(response_mask=mask_array([False, False])), make_step("other")])
    assert merged.weights_R.tolist() == [0.0, 1.0]


def test_no_steps_make_no_rows() -> None:
    merged = merge([])
    assert len(merged) == 0
    assert merged.steps_of_R == []
    assert len(merged.tokens) == 0


def test_padded_rows_end_in_padding() -> None:
    padded = merge(calls(([1], [2]), ([9, 9], [3, 4]))).padded(5, pad_id=7)
    assert padded.input_ids_R_L.tolist() == [[1, 2, 7, 7, 7], [9, 9, 3, 4, 7]]
    assert padded.attention_mask_R_L.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert padded.loss_mask_R_L.tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert padded.logprobs_R_L.tolist() == [[0, -0.5, 0, 0, 0], [0, 0, -0.5, -0.5, 0]]
    assert padded.versions_R_L.tolist() == [[-1, 0, -1, -1, -1], [-1, -1, 0, 0, -1]]


def test_a_row_that_is_too_long_is_refused_or_left_out_in_sight() -> None:
    merged = merge(calls(([1], [2]), ([9, 9], [3, 4])))
    with pytest.raises(BadRequest, match="1 of 2 rows are longer than 3 tokens, the longest has 4"):
        merged.padded(3)
    padded = merged.padded(3, overlong="drop")
    assert padded.kept_R.tolist() == [0]
    assert padded.input_ids_R_L.tolist() == [[1, 2, 0]]


# -- whatever agents do ------------------------------------------------------------------------------------------------

few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
"""So few that rows coincide by chance, too."""


@st.composite
def trajectories(draw: st.DrawFn, uid: str) -> list[Step]:
    """Turns that extend an earlier one, go back, repeat, lose their thinking or begin anew."""
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 7))):
        prompt = draw(few_ids)
        if steps:
            earlier = draw(st.sampled_from(steps))
            before, reply = earlier.prompt_ids.tolist(), earlier.response_ids.tolist()
            prompt = {
                "extend": before + reply + prompt,
                "continue": before + reply,
                "go back": (before + reply)[: draw(st.integers(1, 9))] + prompt,
                "repeat": before,
                "strip": before + reply[1:] + prompt,
                "begin anew": prompt,
            }[draw(st.sampled_from(["extend", "continue", "go back", "repeat", "strip", "begin anew"]))]
        reply = draw(few_ids)
        mask = draw(st.lists(st.booleans(), min_size=len(reply), max_size=len(reply)))
        steps.append(
            make_step(
                uid,
                step_index=index,
                prompt_ids=prompt,
                response_ids=reply,
                response_mask=mask_array(mask),
                response_logprobs=logprobs_array([-1 - index] * len(reply)),
                policy_version=index,
                reward=draw(st.none() | st.sampled_from([0.0, 0.5, 1.0])),
            )
        )
    return steps


rollouts = st.integers(0, 3).flatmap(lambda count: st.tuples(*(trajectories(f"t{i}") for i in range(count))))


def trained(steps: list[Step]) -> int:
    return sum(int(step.response_mask.sum()) for step in steps if step.response_mask is not None)


@given(rollouts)
def test_every_step_can_be_rebuilt_from_its_row(rollouts: tuple[list[Step], ...]) -> None:
    steps = [step for rollout in rollouts for step in rollout]
    merged = merge(steps)
    written = np.zeros(len(merged.tokens), np.int64)
    for row, members in enumerate(merged.steps_of_R):
        at = merged.offsets_R[row]
        for step in (steps[i] for i in members):
            reply = slice(at + len(step.prompt_ids), at + step.tokens)
            assert merged.tokens[at : at + step.tokens].tolist() == [*step.prompt_ids, *step.response_ids]
            assert (merged.loss_mask[reply] == step.response_mask).all()
            assert (merged.logprobs[reply] == step.response_logprobs).all()
            assert (merged.versions[reply] == step.policy_version).all()
            written[reply] += 1
    assert written.max(initial=0) <= 1
    assert not merged.loss_mask[written == 0].any()
    assert not merged.logprobs[written == 0].any()
    assert (merged.versions[written == 0] == -1).all()
    assert sorted(i for members in merged.steps_of_R for i in members) == list(range(len(steps)))
    assert merged.loss_mask.sum() == trained(steps)


@given(rollouts)
def test_weights_sum_to_one_over_a_rollout_that_is_trained(rollouts: tuple[list[Step], ...]) -> None:
    merged = merge([step for rollout in rollouts for step in rollout])
    for number, rollout in enumerate(rollouts):
        of_rollout = merged.trajectory_of_R == number
        assert merged.weights_R[of_rollout].sum() == pytest.approx(1.0 if trained(rollout) else 0.0)
        scores = [step.reward for step in rollout if step.reward is not None]
        rewards = merged.rewards_R[of_rollout]
        assert (rewards == sum(scores)).all() if scores else np.isnan(rewards).all()


@given(rollouts)
def test_a_step_forks_only_if_no_row_could_be_extended(rollouts: tuple[list[Step], ...]) -> None:
    """Held against the rules written out naively, with lists of (id, written by the model)."""
    forks: Counter[ForkReason] = Counter()
    for rollout in rollouts:
        open_rows: list[list[tuple[int, bool]]] = []
        for step in rollout:
            prompt = step.prompt_ids.tolist()
            shared = [in_common(prompt, [token for token, _ in row]) for row in open_rows]
            matching = [number for number, row in enumerate(open_rows) if shared[number] == len(row)]
            row: list[tuple[int, bool]] = []
            if matching:
                row = open_rows[max(matching, key=lambda number: (shared[number], number))]
            else:
                if open_rows:
                    forks[naive_reason(prompt, open_rows, shared)] += 1
                open_rows.append(row)
            row += [(token, False) for token in prompt[len(row) :]]
            row += [(token, True) for token in step.response_ids.tolist()]
    merged = merge([step for rollout in rollouts for step in rollout])
    assert merged.forks == forks
    assert len(merged) == forks.total() + len(rollouts)


def in_common(a: list[int], b: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def naive_reason(prompt: list[int], rows: list[list[tuple[int, bool]]], shared: list[int]) -> ForkReason:
    closest = max(range(len(rows)), key=lambda number: (shared[number], number))
    if shared[closest] == len(prompt):
        return ForkReason.REPEATED
    written_by_model = rows[closest][shared[closest]][1]
    return ForkReason.REPLY_CHANGED if written_by_model else ForkReason.CONTEXT_CHANGED
