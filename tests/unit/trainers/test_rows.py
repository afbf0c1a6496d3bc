"""What of a batch is trained; and that it does not matter into how many rows a rollout is divided."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.advantages import group_advantages
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, logprobs_array, mask_array
from stepwell.trainers.comparison import response_advantages
from stepwell.trainers.learner import Learned, Learner
from stepwell.trainers.policy_loss import log_ratios, policy_loss, token_logprobs
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from tests.unit.trainers.models import VOCABULARY, Bigram, Recurrent, one_turn

tokens = st.integers(0, VOCABULARY - 1)
turns = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=4), st.lists(tokens, min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)
"""What is said to the model, and what it answers, turn after turn."""
groups = st.lists(
    st.lists(st.tuples(turns, st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=4), min_size=1, max_size=3
)
Groups = list[list[tuple[list[tuple[list[int], list[int]]], float]]]


def conversation(uid: str, prompt_uid: str, said: list[tuple[list[int], list[int]]], *, forget: bool) -> list[Step]:
    """One step a turn. With `forget`, a turn's prompt keeps only its last token: every turn is a row of its own."""
    steps: list[Step] = []
    context: list[int] = []
    for turn, (told, answer) in enumerate(said):
        context += told
        prompt = [VOCABULARY - 1] * turn + context[-1:] if forget else context
        recorded = logprobs_array(-1.5 - 0.25 * np.arange(len(answer)))
        step = one_turn(uid, prompt_uid, prompt, answer, response_logprobs=recorded, step_index=turn)
        steps.append(replace(step, uid=f"{uid}-{turn}"))
        context = context + answer
    return steps


def batch_of(made: Groups, *, forget: bool) -> Batch:
    steps: list[Step] = []
    sizes: list[int] = []
    for g, group in enumerate(made):
        size = len(steps)
        for r, (said, reward) in enumerate(group):
            rollout = conversation(f"{g}-{r}", f"p{g}", said, forget=forget)
            steps += [*rollout[:-1], replace(rollout[-1], reward=reward)]
        sizes.append(len(steps) - size)
    return make_batch(pack(steps), sizes)


def learn(batch: Batch, **settings: Any) -> tuple[Learned, torch.Tensor]:
    """What came of it, and the gradients."""
    model = Bigram()
    learned = Learner(model, None, Settings(**settings)).learn(choose_rows(batch, ()), 0)
    gradient = model.table.weight.grad
    return learned, torch.zeros(1) if gradient is None else gradient


@settings(max_examples=40)
@given(groups, st.integers(1, 40))
def test_a_rollout_in_one_row_or_in_many_has_the_same_advantage_loss_and_gradient(made: Groups, per_pass: int) -> None:
    whole, split = batch_of(made, forget=False), batch_of(made, forget=True)
    one, many = choose_rows(whole, ()), choose_rows(split, ())
    assert len(many.merged) >= len(one.merged) == sum(map(len, made))
    of_whole, of_split = (response_advantages(batch, RowSettings()) for batch in (whole, split))
    np.testing.assert_array_equal(of_whole, of_split)
    assert one.tokens == many.tokens
    (learned, gradient), (again, same) = learn(whole), learn(split, tokens_per_pass=per_pass)
    assert again.loss == pytest.approx(learned.loss, abs=1e-5)
    assert again.ratio == pytest.approx(learned.ratio, abs=1e-5)
    assert again.clipped == pytest.approx(learned.clipped, abs=1e-6)
    torch.testing.assert_close(gradient, same, atol=1e-5, rtol=1e-4)


@settings(max_examples=40)
@given(groups)
def test_merged_rows_have_the_loss_of_one_padded_row_a_step(made: Groups) -> None:
    batch, model, rules = batch_of(made, forget=False), Recurrent(), Settings()
    rows = choose_rows(batch, ())
    learned = Learner(model, None, rules).learn(rows, 0)
    padded = batch.padded(40, 4)
    advantages_T = group_advantages(batch.returns_T, batch.group_of_T)
    taught = np.isin(batch.group_of_T, batch.group_of_T[advantages_T != 0])[batch.trajectory_of_S]
    model, mask = Recurrent(), torch.from_numpy(padded.response_mask_S_R * taught[:, None]).bool()
    # a model that reads from the left is handed rows without padding before them
    total = 0.0
    for step, (ids, attention) in enumerate(zip(padded.input_ids_S_T, padded.attention_mask_S_T, strict=True)):
        kept = torch.from_numpy(ids[attention == 1])[None]
        trained = torch.zeros_like(kept, dtype=torch.bool)
        response = int(batch.columns.response_lengths_S[step])
        trained[0, -response:] = mask[step, :response]
        recorded = torch.from_numpy(padded.rollout_log_probs_S_R[step])[mask[step]]
        advantages = torch.full_like(recorded, float(advantages_T[batch.trajectory_of_S[step]]))
        logprobs = token_logprobs(model, kept, torch.ones_like(kept), trained, 1.0)
        ratios = log_ratios(logprobs, recorded, None)
        total += policy_loss(logprobs, ratios, advantages, rules).losses_N.sum().item()
    assert total / max(rows.tokens, 1) == pytest.approx(learned.loss, abs=1e-5)


def group(rewards: list[float | None], **fields: Any) -> list[Step]:
    return [one_turn(f"t{i}", "p", [1, 2], [3, 4], reward=reward, **fields) for i, reward in enumerate(rewards)]


def trained_uids(batch: Batch, known: tuple[str, ...] = ()) -> set[str]:
    rows = choose_rows(batch, known)
    return {rows.uids_T[t] for t in rows.merged.trajectory_of_R[rows.chosen_R].tolist()}


def test_a_group_that_earned_the_same_is_not_trained_but_counts_as_consumed() -> None:
    batch = make_batch(pack(group([1.0, 1.0])), [2])
    assert trained_uids(batch) == set()
    assert choose_rows(batch, ()).uids == ("t0", "t1")


def test_an_average_rollout_of_a_group_that_teaches_is_among_the_tokens_of_the_mean() -> None:
    assert trained_uids(make_batch(pack(group([0.0, 0.5, 1.0])), [3])) == {"t0", "t1", "t2"}


def test_an_unscored_rollout_is_not_trained() -> None:
    assert trained_uids(make_batch(pack(group([0.0, None, 1.0])), [3])) == {"t0", "t2"}


def test_a_rollout_without_log_probabilities_is_trained_unless_only_recorded_ones_are_wanted() -> None:
    blind = replace(group([0.0])[0], trajectory_uid="blind", response_logprobs=None)
    batch = make_batch(pack([*group([1.0, 0.0]), blind]), [3])
    assert trained_uids(batch) == {"t0", "t1", "blind"}
    rows = choose_rows(batch, (), RowSettings(old_logprobs="recorded"))
    assert (rows.tokens, rows.left_out.rollouts_without_logprobs) == (4, 1)


def test_a_group_that_was_trained_before_is_left_out_whole() -> None:
    other = [replace(step, trajectory_uid=f"other{i}", prompt_uid="q") for i, step in enumerate(group([1.0, 0.0]))]
    batch = make_batch(pack([*group([1.0, 0.0]), *other]), [2, 2])
    assert trained_uids(batch, ("t1",)) == {"other0", "other1"}
    assert choose_rows(batch, ("t1",)).uids == ("other0", "other1")


def test_masked_tokens_are_not_trained() -> None:
    batch = make_batch(pack(group([1.0, 0.0], response_mask=mask_array([False, True]))), [2])
    (only,) = choose_rows(batch, ()).passes(1000)
    assert only.trained_R_L.tolist() == [[False, False, False, True]] * 2


def test_a_pass_holds_as_many_tokens_as_it_may_with_its_padding() -> None:
    steps = [one_turn(f"t{i}", "p", [1] * n, [2], reward=i % 2) for i, n in enumerate([9, 1, 3, 1, 2])]
    shapes = [part.ids_R_L.shape for part in choose_rows(make_batch(pack(steps), [5]), ()).passes(8)]
    assert shapes == [(2, 2), (2, 4), (1, 10)]
