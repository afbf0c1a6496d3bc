"""The loss, against what is worked out by hand."""

import math
from typing import Any

import pytest
import torch

from stepwell.trainers.algorithms import ALGORITHMS, AlgorithmKind
from stepwell.trainers.policy_loss import PolicyLoss, log_ratios, policy_loss
from stepwell.trainers.settings import Settings


def token_losses(
    logprobs: torch.Tensor,
    recorded: torch.Tensor,
    advantages: torch.Tensor,
    proximal: torch.Tensor | None = None,
    **settings: Any,
) -> PolicyLoss:
    return policy_loss(logprobs, log_ratios(logprobs, recorded, proximal), advantages, Settings(**settings))


def loss_and_gradient(ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """Of one token that has become `ratio` times as likely; the gradient is by its log-probability."""
    recorded = torch.tensor([-1.5])
    logprobs = (recorded + math.log(ratio)).requires_grad_()
    loss = token_losses(logprobs, recorded, torch.tensor([advantage]), **settings).losses_N.sum()
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


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (1.5, 1.5), (2.0, 2.0), (5.0, 0.0)])
def test_a_masked_token_is_not_trained(ratio: float, weight: float) -> None:
    found = loss_and_gradient(ratio, 2.0, importance_cap=2.0, importance_sampling="masked")
    assert found == pytest.approx((-weight * 2.0, -weight * 2.0), abs=1e-5)


@pytest.mark.parametrize(("ratio", "weight"), [(0.0, 0.0), (0.5, 0.5), (5.0, 5.0), (9.0, 5.0)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clips_the_weight_and_every_token_keeps_its_gradient(
    ratio: float, weight: float, advantage: float
) -> None:
    found = loss_and_gradient(max(ratio, 1e-30), advantage, algorithm="cispo")
    assert found == pytest.approx((-weight * advantage, -weight * advantage), abs=1e-5)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.9])
def test_rloo_does_not_clip(ratio: float) -> None:
    assert loss_and_gradient(ratio, 2.0, algorithm="rloo") == pytest.approx((-2.0 * ratio, -2.0 * ratio), abs=1e-5)


def test_with_a_cap_only_what_a_batch_has_changed_is_clipped() -> None:
    """The proximal policy makes the token 1.5 times as likely as when it was sampled, the current one 2 times more."""
    recorded, proximal = torch.tensor([-3.0]), torch.tensor([-3.0 + math.log(1.5)])
    for moved, slope in ((1.2, 1.2), (2.0, 0.0)):
        logprobs = (proximal + math.log(moved)).requires_grad_()
        loss = token_losses(logprobs, recorded, torch.ones(1), proximal, importance_cap=4.0)
        loss.losses_N.sum().backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(-1.5 * slope, abs=1e-5)
        assert loss.ratios_N.item() == pytest.approx(1.5 * moved, abs=1e-5)
        assert loss.clipped_N.item() is (slope == 0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_was_all_but_impossible_does_not_spoil_the_gradient(
    algorithm: AlgorithmKind, advantage: float
) -> None:
    recorded, logprobs = torch.tensor([-120.0]), torch.tensor([-0.5], requires_grad=True)
    loss = token_losses(logprobs, recorded, torch.tensor([advantage]), algorithm=algorithm)
    loss.losses_N.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert loss.ratios_N.isfinite().all()


def test_what_is_clipped_is_told() -> None:
    recorded = torch.zeros(4) - 1
    logprobs = recorded + torch.tensor([0.0, 1.0, 1.0, 2.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = token_losses(logprobs, recorded, advantages)
    assert loss.clipped_N.tolist() == [False, True, False, True]
    assert token_losses(logprobs, recorded, advantages, importance_cap=3.0).clipped_N.tolist() == [
        False,
        False,
        False,
        True,
    ]
