"""Live sessions are groups of one. With the baseline `group` alone they teach nothing, and the trainer says so; with a
running baseline the same traffic makes what earns more likelier."""

import logging
import re

import pytest
import torch

from stepwell.errors import NothingLearned
from stepwell.steps.advantages import BaselineKind
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

GOOD, BAD = 3, 4
PROMPT = [1, 2]
SESSIONS, PER_BATCH = 40, 8


def live_traffic() -> TrainingPool:
    """Sessions of which every fourth has the good answer."""
    pool = TrainingPool()
    for number in range(SESSIONS):
        answer = GOOD if number % 4 == 0 else BAD
        session = [one_turn(f"s{number}", f"session@s{number}", PROMPT, [answer])]
        pool.add_group(f"session@s{number}", [(session, float(answer == GOOD))])
    return pool


def settings(baseline: BaselineKind, fallback: BaselineKind) -> Settings:
    return Settings(
        groups=PER_BATCH,
        updates=SESSIONS // PER_BATCH,
        learning_rate=1e-2,
        baseline=baseline,
        fallback_baseline=fallback,
        max_unlearnable=3,
    )


def probability(model: torch.nn.Module, token: int) -> float:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[0, -1].softmax(-1)[token].item()


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_without_a_fallback_groups_of_one_change_no_weight_and_the_trainer_says_why(
    baseline: BaselineKind, caplog: pytest.LogCaptureFixture
) -> None:
    pool, model = live_traffic(), Recurrent()

    with caplog.at_level(logging.WARNING), pytest.raises(NothingLearned) as stopped:
        AsyncTrainer(pool, model, settings=settings(baseline, "none")).run()

    assert all(torch.equal(*pair) for pair in zip(model.parameters(), Recurrent().parameters(), strict=True))
    said = str(stopped.value)
    assert re.search(rf"from 3 batches in a row: {3 * PER_BATCH} groups of one", said)
    assert re.search(r"To do: .*fallback_baseline.*running", said)
    assert caplog.text.count("nothing can be learned from this data") == 1
    assert len(pool.acknowledged) == 3


@pytest.mark.parametrize(("baseline", "fallback"), [("running", "none"), ("group", "running"), ("batch", "none")])
def test_with_a_baseline_that_needs_no_siblings_the_same_traffic_teaches(
    baseline: BaselineKind, fallback: BaselineKind
) -> None:
    model = Recurrent()

    AsyncTrainer(live_traffic(), model, settings=settings(baseline, fallback)).run()

    assert probability(model, GOOD) > 1.1 * probability(Recurrent(), GOOD)
    assert probability(model, BAD) < probability(Recurrent(), BAD)


def test_the_default_settings_learn_from_groups_of_one() -> None:
    assert (Settings().baseline, Settings().fallback_baseline) == ("group", "running")
