from typing import Any

import numpy as np
import pytest
import torch

from stepwell.errors import BadRequest
from stepwell.trainers.algorithms import AGGREGATIONS, LossAggregation, token_weights
from stepwell.trainers.learner import Learner
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import Settings
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

SEQUENCES = np.array([4, 4, 4, 7])
"""Three tokens of one rollout, and one of another."""


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("token_mean", [1 / 4] * 4),
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("fixed_length", [1 / 20] * 4),
    ],
)
def test_each_kind_weighs_tokens_as_it_says(kind: LossAggregation, weights: list[float]) -> None:
    assert token_weights(kind, SEQUENCES, 10).tolist() == pytest.approx(weights)


def test_another_kind_is_refused() -> None:
    with pytest.raises(BadRequest, match="loss_aggregation is one of token_mean, sequence_mean, fixed_length"):
        token_weights("mean", SEQUENCES, 10)  # type: ignore[arg-type]


def learned(**settings: Any) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradient of a group with a long rollout of two rows and a short one."""
    pool, model = TrainingPool(), Recurrent()
    long = [one_turn("a", "p", [1], [2, 3, 4], step_index=0), one_turn("a", "p", [5, 6], [7], step_index=1)]
    pool.add_group("p", [(long, 1.0), ([one_turn("b", "p", [1], [5])], 0.0)])
    chosen = Settings(max_gradient_norm=1e9, clip_low=0.99, clip_high=1e9, **settings)
    told = Learner(model, None, chosen).learn(choose_rows(pool.fetch_batch(1), (), chosen), 0)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return told.loss, gradients


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_passes(kind: LossAggregation) -> None:
    loss, gradients = learned(loss_aggregation=kind)
    same_loss, same_gradients = learned(loss_aggregation=kind, tokens_per_pass=1)
    assert loss == pytest.approx(same_loss, rel=1e-5)
    for some, other in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(some, other, atol=1e-6, rtol=1e-4)


def test_a_rollout_in_several_rows_is_one_sequence() -> None:
    """Five tokens in three rows of two rollouts."""
    by_tokens, of_tokens = learned()
    by_length, of_length = learned(loss_aggregation="fixed_length", fixed_length=10)
    assert by_length == pytest.approx(by_tokens * 5 / 20, rel=1e-5)
    for some, other in zip(of_length, of_tokens, strict=True):
        torch.testing.assert_close(some, other * 5 / 20, atol=1e-7, rtol=1e-4)
