"""The model's distribution at trained tokens, against what is worked out by hand."""

import math

import pytest
import torch

from stepwell.trainers.policy_loss import entropies, kl_penalty, token_logprobs
from tests.unit.trainers.models import Recurrent, logprobs_by


def test_the_penalty_is_nothing_at_the_reference_and_grows_either_way() -> None:
    reference = torch.tensor([-1.0, -1.0, -1.0])
    penalty = kl_penalty(torch.tensor([-1.0, -2.0, -0.5]), reference)
    assert penalty.tolist() == pytest.approx([0.0, math.e - 2, math.exp(-0.5) - 0.5])


def test_log_probabilities_are_those_of_the_trained_tokens_and_padding_changes_nothing() -> None:
    model = Recurrent()
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    attention = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    trained = torch.tensor([[False, False, True, False, True], [False, True, True, False, False]])
    found = token_logprobs(model, ids, attention, trained, 1.0).tolist()
    first, second = logprobs_by(model, [1, 2], [3, 4, 5]), logprobs_by(model, [6], [7, 8])
    assert found == pytest.approx([first[0], first[2], *second], abs=1e-6)


def test_a_temperature_divides_the_logits() -> None:
    model = Recurrent()
    ids, trained = torch.tensor([[1, 2, 3]]), torch.tensor([[False, False, True]])
    logits = model(input_ids=ids, attention_mask=None).logits[0, 1] / 0.5
    expected = logits.log_softmax(-1)[3].item()
    assert token_logprobs(model, ids, torch.ones_like(ids), trained, 0.5).item() == pytest.approx(expected, abs=1e-6)


def test_the_entropy_is_that_of_each_tokens_distribution_however_many_there_are() -> None:
    uniform, certain = torch.full((1, 4), 0.25).log(), torch.tensor([[1.0, 1e-30, 1e-30, 1e-30]]).log()
    found = entropies(torch.cat([uniform, certain]).repeat(300, 1))
    torch.testing.assert_close(found, torch.tensor([1.3863, 0.0]).repeat(300), atol=1e-4, rtol=0)


def test_each_token_has_its_own_temperature() -> None:
    ids = torch.tensor([[1, 2, 3]])
    trained = torch.tensor([[False, True, True]])
    model, ones = Recurrent(), torch.ones_like(ids)
    cool, hot = (token_logprobs(model, ids, ones, trained, temperature) for temperature in (0.5, 1.5))
    both = token_logprobs(model, ids, ones, trained, torch.tensor([0.5, 1.5]))
    torch.testing.assert_close(both, torch.stack([cool[0], hot[1]]))
