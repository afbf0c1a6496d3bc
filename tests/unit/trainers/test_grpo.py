"""The loss, against what is worked out by hand."""

import math
from typing import Any

import pytest
import torch

from stepwell.trainers.grpo import entropies, kl_penalty, policy_loss, token_logprobs
from stepwell.trainers.settings import Settings
from tests.unit.trainers.models import Recurrent, logprobs_by


def loss_and_gradient(ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """Of one token that has become `ratio` times as likely; the gradient is by its log-probability."""
    recorded = torch.tensor([-1.5])
    logprobs = (recorded + math.log(ratio)).requires_grad_()
    loss = policy_loss(logprobs, recorded, torch.tensor([advantage]), Settings(**settings)).losses_N.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # likelier than 1.28: enough
        (0.5, 2.0, -1.0, -1.0),  # rarer though it was good: brought back
        (1.5, -2.0, 3.0, 3.0),  # likelier though it was bad: brought back
        (0.5, -2.0, 1.6, 0.0),  # rarer than 0.8: enough
        (5.0, -2.0, 6.0, 0.0),  # the dual clip: 3 at most
    ],
)
def test_a_token_counts_until_it_is_clipped(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (1.5, 1.5), (5.0, 2.0)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_capped_weight_is_a_weight_and_nothing_is_left_alone(ratio: float, weight: float, advantage: float) -> None:
    found = loss_and_gradient(ratio, advantage, importance_cap=2.0)
    assert found == pytest.approx((-weight * advantage, -weight * advantage), abs=1e-5)


def test_what_is_clipped_is_told() -> None:
    recorded = torch.zeros(4) - 1
    logprobs = recorded + torch.tensor([0.0, 1.0, 1.0, 2.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = policy_loss(logprobs, recorded, advantages, Settings())
    assert loss.clipped_N.tolist() == [False, True, False, True]
    assert policy_loss(logprobs, recorded, advantages, Settings(importance_cap=3.0)).clipped_N.tolist() == [
        False,
        False,
        False,
        True,
    ]


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
