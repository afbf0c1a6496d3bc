"""T3: every token is trained at the temperature at which it was sampled; what cannot be is left out and counted.

One stray temperature ended AsyncTrainer and its batch came back for ever; pool_loader, TRL and verl did not look at it.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rig.waiting import wait_until
from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, logprobs_array
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.reporting import UpdateMetrics
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.trl import StepwellRolloutWorker
from stepwell.trainers.verl import verl_rows
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

SETTINGS = Settings(groups=1, updates=4)


def sampled(uid: str, prompt: Sequence[int], response: Sequence[int], temperature: float | None, **fields: Any) -> Step:
    """As an engine with the weights of Recurrent() samples it at this temperature."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = Recurrent()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] / (temperature or 1.0)
    table = logits.log_softmax(-1)
    logprobs = logprobs_array([table[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)])
    return one_turn(uid, "p", prompt, response, response_logprobs=logprobs, temperature=temperature, **fields)


def rollouts(*temperatures: float | None) -> list[Step]:
    return [sampled(f"t{n}", [1, 2], [3 + n, 5], temperature) for n, temperature in enumerate(temperatures)]


def pool_of(*temperatures: float | None) -> TrainingPool:
    pool = TrainingPool()
    pool.add_group("p", [([step], float(n)) for n, step in enumerate(rollouts(*temperatures))])
    return pool


def batch_of(*temperatures: float | None) -> Batch:
    return pool_of(*temperatures).fetch_batch(1)


def test_each_token_is_trained_at_its_own_temperature() -> None:
    pool = pool_of(0.5, 1.0, 1.5)

    metrics = AsyncTrainer(pool, Recurrent(), settings=SETTINGS).step()

    assert metrics.tokens == 6
    assert metrics.ratio == pytest.approx(1.0, abs=1e-5)
    assert metrics.rollout_kl == pytest.approx(0.0, abs=1e-6)
    assert metrics.outside_clip == 0.0
    assert pool.acknowledged == ["lease-1"]


def test_steps_of_one_row_keep_their_temperatures() -> None:
    first, second = sampled("t0", [1, 2], [3], 0.7), sampled("t0", [1, 2, 3, 4], [5, 6], 1.2)
    merged = make_batch(pack([first, second]), [2]).merged()

    assert merged.temperatures.tolist() == pytest.approx([1.0, 1.0, 0.7, 1.0, 1.2, 1.2])
    padded = merged.padded(7).temperatures_R_L
    assert padded.tolist()[0] == pytest.approx([1.0, 1.0, 0.7, 1.0, 1.2, 1.2, 1.0])


def test_a_stray_temperature_leaves_out_its_step_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(1.0, 0.7, 1.0)

    with caplog.at_level(logging.WARNING):
        metrics = AsyncTrainer(pool, Recurrent(), settings=Settings(groups=1, temperature=1.0)).step()

    assert (metrics.tokens, metrics.steps_other_temperature, metrics.update) == (4, 1, 1)
    assert pool.acknowledged == ["lease-1"]
    assert "sampled at another temperature" in caplog.text


def test_a_step_that_is_left_out_does_not_change_the_advantages_of_the_others() -> None:
    batch = batch_of(1.0, 0.7, 1.0)
    all_trained, without = choose_rows(batch, ()), choose_rows(batch, (), RowSettings(temperature=1.0))

    kept = without.trained
    np.testing.assert_array_equal(without.advantages[kept], all_trained.advantages[kept])


def test_a_group_whose_telling_steps_are_left_out_is_not_trained() -> None:
    """What is left has the advantage 0. The group is counted for its temperature, not as one of equal rollouts."""
    pool = TrainingPool()
    pool.add_group(
        "p", [([step], reward) for step, reward in zip(rollouts(0.7, 1.0, 0.7), (1.0, 0.5, 0.0), strict=True)]
    )
    metrics = AsyncTrainer(pool, Recurrent(), settings=Settings(groups=1, temperature=1.0)).step()
    assert (metrics.tokens, metrics.groups_equal, metrics.steps_other_temperature) == (0, 0, 2)


def test_an_unknown_temperature_is_left_out_and_counted_unless_one_is_assumed() -> None:
    trained = AsyncTrainer(pool_of(1.0, None, 1.0), Recurrent(), settings=SETTINGS).step()
    assert (trained.tokens, trained.steps_unknown_temperature, trained.temperatures_assumed) == (6, 0, 1)

    strict = Settings(groups=1, assumed_temperature=None)
    left_out = AsyncTrainer(pool_of(1.0, None, 1.0), Recurrent(), settings=strict).step()
    assert (left_out.tokens, left_out.steps_unknown_temperature, left_out.temperatures_assumed) == (4, 1, 0)


def test_an_assumed_temperature_that_is_not_trained_is_counted_as_unknown_and_the_remedy_is_to_assume_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The samples tell no temperature, so a trainer cannot be set to it."""
    settings = Settings(groups=1, temperature=0.7)
    left_out = AsyncTrainer(pool_of(0.7, None, 0.7), Recurrent(), settings=settings).step()
    assert (left_out.tokens, left_out.steps_unknown_temperature, left_out.steps_other_temperature) == (4, 1, 0)
    assert "or set the trainer's assumed_temperature" in caplog.text


def test_a_loader_gives_temperature_1_or_all_with_their_temperatures() -> None:
    (batch,) = pool_loader(pool_of(1.0, 0.5, 1.0), 1, batches=1)
    assert batch["trained"].sum() == 4

    (batch,) = pool_loader(pool_of(1.0, 0.5, 1.0), 1, batches=1, rows=RowSettings())
    assert sorted(batch["temperatures"][batch["trained"]].tolist()) == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_trl_gets_what_was_sampled_at_its_temperature() -> None:
    worker = StepwellRolloutWorker(pool_of(0.7, 1.0, 0.7), temperature=0.7)
    worker.resume(None)
    worker.start()
    samples = [worker.rollout_buffer.get(timeout=10) for _ in range(2)]
    worker.stop()

    assert [sample.input_ids.tolist() for sample in samples] == [[1, 2, 3, 5], [1, 2, 5, 5]]
    assert worker.rollout_buffer.empty()
    wait_until(lambda: not worker.metrics_queue.empty(), "its metrics")
    assert worker.metrics_queue.get_nowait()["steps_left_out"] == (1.0, 3.0)


@pytest.mark.parametrize("merged", [False, True])
def test_verl_gets_what_was_sampled_at_its_temperature(merged: bool) -> None:
    rows = verl_rows(
        batch_of(0.7, 1.0, 0.7),
        RowSettings(temperature=0.7),
        prompt_length=2,
        response_length=2,
        pad_id=0,
        merged=merged,
        overlong="raise",
    )
    assert rows.tensors["responses"].tolist() == [[3, 5], [5, 5]]
    assert rows.tensors["temperatures"].tolist() == [[pytest.approx(0.7)] * 2] * 2
    assert rows.steps_left_out == 1


def test_a_wrong_temperature_shows_outside_the_clip_while_the_mean_ratio_stays_near_1() -> None:
    """Ratios are too high for some tokens and too low for others, so their mean tells nothing."""

    def update(told: float) -> UpdateMetrics:
        pool = TrainingPool()
        pool.add_group("p", [([replace(step, temperature=told)], float(n % 2)) for n, step in enumerate(drawn)])
        return AsyncTrainer(pool, Recurrent(), settings=SETTINGS).step()

    with torch.no_grad():
        first = Recurrent()(input_ids=torch.tensor([[1, 2]]), attention_mask=None).logits[0, -1]
    torch.manual_seed(0)
    answers = (first / 0.2).softmax(-1).multinomial(600, replacement=True).tolist()
    drawn = [sampled(f"t{n}", [1, 2], [answer], 0.2) for n, answer in enumerate(answers)]
    right, wrong = update(0.2), update(1.0)

    assert wrong.ratio == pytest.approx(1.0, abs=0.15)
    assert wrong.outside_clip > 0.5
    assert wrong.rollout_kl > 0.05
    assert right.outside_clip == 0.0
    assert right.rollout_kl == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < right.entropy < wrong.entropy


@pytest.mark.parametrize(("sent", "trained"), [(1.0, 6), ("warm", 4)])
def test_a_step_from_before_the_column_tells_it_in_its_sampling(sent: object, trained: int) -> None:
    first, second, third = rollouts(1.0, None, 1.0)
    pool = TrainingPool()
    steps = (first, replace(second, sampling={"temperature": sent}), third)  # type: ignore[dict-item]
    pool.add_group("p", [([step], float(n)) for n, step in enumerate(steps)])

    strict = Settings(groups=1, assumed_temperature=None)
    assert AsyncTrainer(pool, Recurrent(), settings=strict).step().tokens == trained
