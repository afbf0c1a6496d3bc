"""Tokens that were recorded without log-probabilities are trained: by the weights that sampled them where the trainer
has these, else by the current ones, and what was done is said and counted."""

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stepwell.trainers.trl_groups import PolicyVersions

from stepwell.errors import BadRequest
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, logprobs_array
from stepwell.trainers import trl_callback as trl_old_logprobs
from stepwell.trainers.learner import KEPT_VERSIONS, OldPolicies
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.reporting import UpdateMetrics
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.trl import StepwellRolloutWorker, samples_of
from stepwell.trainers.verl.mode_settings import PoolModeSettings
from stepwell.trainers.verl.pool_feed import PoolFeed
from tests.unit.trainers.models import Recurrent, logprobs_by, one_turn
from tests.unit.trainers.test_trainer import Guarding, SyncLog, weights
from tests.unit.trainers.training_pool import TrainingPool

SETTINGS = Settings(groups=1, updates=10, learning_rate=1e-2)
SILENT: dict[str, Any] = {"response_logprobs": None}
ANSWERS = ([3, 4], [5, 4], [3, 6])


def fill(pool: TrainingPool, groups: int, *, is_recorded: bool) -> None:
    """All sampled by the first weights, as version 0."""
    for g in range(groups):
        rollouts = []
        for r, answer in enumerate(ANSWERS):
            own = logprobs_array(logprobs_by(Recurrent(), [g, 2], answer)) if is_recorded else None
            rollouts.append(([one_turn(f"{g}-{r}", f"p{g}", [g, 2], answer, response_logprobs=own)], float(r)))
        pool.add_group(f"p{g}", rollouts)


def trained(updates: int, *, is_recorded: bool, **settings: Any) -> tuple[torch.nn.Module, list[UpdateMetrics]]:
    pool, model = TrainingPool(), Recurrent()
    fill(pool, updates, is_recorded=is_recorded)
    trainer = AsyncTrainer(pool, model, settings=replace(SETTINGS, **settings), sync=SyncLog(pool))
    return model, [trainer.step() for _ in range(updates)]


def test_the_weights_that_sampled_give_the_gradient_of_recorded_log_probabilities() -> None:
    """Also when they are no longer those that are trained."""
    updates = 1 + KEPT_VERSIONS
    (recorded, _), (recomputed, metrics) = (trained(updates, is_recorded=told) for told in (True, False))
    for one, other in zip(weights(recorded), weights(recomputed), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert [each.logprobs_recomputed for each in metrics] == [6] * updates
    assert [each.logprobs_current for each in metrics] == [0] * updates
    assert [each.staleness for each in metrics] == [0.0, 1.0, 2.0]
    assert metrics[2].ratio != pytest.approx(1.0, abs=1e-3), "the weights have moved"


def test_a_version_that_is_not_at_hand_is_replaced_by_the_current_one_and_its_staleness_is_told() -> None:
    _, metrics = trained(2 + KEPT_VERSIONS, is_recorded=False)
    last = metrics[-1]
    assert (last.logprobs_recomputed, last.logprobs_current) == (0, 6)
    assert last.logprobs_staleness == 1.0 + KEPT_VERSIONS
    assert last.ratio == pytest.approx(1.0, abs=1e-6)


def test_current_has_ratio_1_and_keeps_no_weights() -> None:
    _, metrics = trained(2, is_recorded=False, old_logprobs="current")
    assert [(each.logprobs_recomputed, each.logprobs_current) for each in metrics] == [(0, 6), (0, 6)]
    assert [each.logprobs_staleness for each in metrics] == [0.0, 1.0]
    assert [each.ratio for each in metrics] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_recorded_leaves_out_what_has_none() -> None:
    model, (metrics,) = trained(1, is_recorded=False, old_logprobs="recorded")
    assert (metrics.tokens, metrics.rollouts_without_logprobs) == (0, 3)
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(Recurrent()), strict=True))


def test_weights_that_a_guard_did_not_let_through_are_no_version() -> None:
    pool = TrainingPool()
    fill(pool, 1, is_recorded=False)
    guard = Guarding(pool, dict(Recurrent().state_dict()))
    metrics = AsyncTrainer(pool, Recurrent(), settings=SETTINGS, sync=guard).step()
    assert (metrics.logprobs_recomputed, metrics.logprobs_current) == (0, 6)


def test_without_a_sync_no_version_is_at_hand() -> None:
    pool = TrainingPool()
    fill(pool, 1, is_recorded=False)
    metrics = AsyncTrainer(pool, Recurrent(), settings=SETTINGS).step()
    assert (metrics.tokens, metrics.logprobs_recomputed, metrics.logprobs_current) == (6, 0, 6)


def two_turns(uid: str, last: int) -> list[Step]:
    """The first turn is recorded, the second one is not."""
    return [
        one_turn(uid, "p", [1, 2], [3, 4], step_index=0),
        one_turn(uid, "p", [1, 2, 3, 4, 9], [last, 6], step_index=1, **SILENT),
    ]


def test_a_rollout_with_one_recorded_turn_is_right_for_each_token() -> None:
    steps = [*two_turns("a", 5), *two_turns("b", 7)]
    steps = [replace(step, reward=float(n >= 2), temperature=1.0) for n, step in enumerate(steps)]
    model = Recurrent(dropout=0.5).train()
    rows = OldPolicies(model, Settings()).fill(choose_rows(make_batch(pack(steps), [4]), ()))
    first, second = rows.merged.logprobs.reshape(2, 7)
    assert first[2:4].tolist() == second[2:4].tolist() == [-2.0, -2.0], "recorded ones are kept"
    quiet = Recurrent(dropout=0.5).eval()
    assert first[5:].tolist() == pytest.approx(logprobs_by(quiet, [1, 2, 3, 4, 9], [5, 6]), abs=1e-5)
    assert second[5:].tolist() == pytest.approx(logprobs_by(quiet, [1, 2, 3, 4, 9], [7, 6]), abs=1e-5)
    assert rows.missing.reshape(2, 7).tolist() == [[False] * 5 + [True] * 2] * 2
    assert model.training
    assert all(module.training for module in model.modules())


def test_a_temperature_counts_for_what_is_computed() -> None:
    steps = [one_turn(f"t{n}", "p", [1], [2, 3 + n], reward=float(n), temperature=0.5, **SILENT) for n in range(2)]
    rows = OldPolicies(Recurrent(), Settings()).fill(choose_rows(make_batch(pack(steps), [2]), ()))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        table = (Recurrent()(input_ids=ids, attention_mask=None).logits[0] / 0.5).log_softmax(-1)
    assert rows.merged.logprobs[1:3].tolist() == pytest.approx([table[0, 2].item(), table[1, 3].item()], abs=1e-5)


def test_what_is_not_known_is_said_once_with_count_and_staleness(caplog: pytest.LogCaptureFixture) -> None:
    pool, model = TrainingPool(), Recurrent()
    fill(pool, 1, is_recorded=False)
    for g in (1, 2):
        silent = [one_turn(f"{g}-{r}", f"p{g}", [g], [3 + r], temperature=None, **SILENT) for r in range(2)]
        pool.add_group(f"p{g}", [([step], float(r)) for r, step in enumerate(silent)])
    trainer = AsyncTrainer(pool, model, settings=SETTINGS, sync=SyncLog(pool))
    with caplog.at_level(logging.WARNING):
        metrics = [trainer.step() for _ in range(3)]
    said = [record.getMessage() for record in caplog.records if "not all is known" in record.getMessage()]
    assert len(said) == 2, "the log-probabilities with the first batch, the temperatures with the second"
    assert "6 of 6 trained tokens have no recorded log-probability: 6 have that of the weights that sampled" in said[0]
    assert "0.0 versions newer" in said[0]
    assert "2 steps do not tell their temperature" in said[1]
    assert [each.temperatures_assumed for each in metrics] == [0, 2, 2]


def test_a_loader_marks_what_is_missing() -> None:
    pool = TrainingPool()
    pool.add_group("p", [(two_turns("a", 5), 1.0), (two_turns("b", 7), 0.0)])
    (batch,) = pool_loader(pool, 1, batches=1)
    missing = batch["missing_logprobs"]
    assert missing.tolist() == [[False] * 5 + [True] * 2] * 2
    assert batch["logprobs"][missing].isnan().all()
    assert batch["logprobs"][batch["trained"] & ~missing].tolist() == [-2.0] * 4


def test_a_trainer_that_cannot_do_a_value_refuses_it_with_a_sentence() -> None:
    pool, rows = TrainingPool(), RowSettings(old_logprobs="recomputed")
    refusing: list[Any] = [
        lambda: next(iter(pool_loader(pool, 1, rows=rows))),
        lambda: StepwellRolloutWorker(pool, old_logprobs="recomputed"),
        lambda: PoolFeed(pool, PoolModeSettings(weights="folder", old_logprobs="recomputed")),
    ]
    for make in refusing:
        with pytest.raises(BadRequest, match="old_logprobs='recomputed'.*Set it to"):
            make()


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(BadRequest, match="recorded, recomputed, current"):
        Settings(old_logprobs="latest")  # type: ignore[arg-type]


# -- TRL ---------------------------------------------------------------------------------------------------------------


class TrlLoss:
    """What TRL's compute_loss does with these fields."""

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        selected = inputs["token_index"] >= 0
        old, places = inputs["old_log_probs"][selected], inputs["token_index"][selected]
        log_ratio = model(inputs["input_ids"]).log_probs.flatten()[places] - old
        loss: torch.Tensor = (log_ratio.exp() * inputs["advantages"][selected]).sum()
        return loss


class Packed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor([-1.0, -2.0, -3.0, -4.0]))

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(log_probs=self.values[None])


def micro_batch(old: list[float], places: list[int]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.zeros(1, 4),
        "old_log_probs": torch.tensor([old]),
        "token_index": torch.tensor([places]),
        "advantages": torch.ones(1, len(old)),
    }


@pytest.fixture
def trl_loss(monkeypatch: pytest.MonkeyPatch) -> type[TrlLoss]:
    own = type("AsyncGRPOTrainer", (TrlLoss,), {})
    monkeypatch.setitem(sys.modules, trl_old_logprobs.TRAINER_MODULE, SimpleNamespace(AsyncGRPOTrainer=own))
    trl_old_logprobs.install()
    trl_old_logprobs.install()
    return own


def gradient(loss: type[TrlLoss], inputs: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    model = Packed()
    value = loss().compute_loss(model, inputs)
    value.backward()  # type: ignore[no-untyped-call]
    assert model.values.grad is not None
    return value.item(), model.values.grad.tolist()


def test_trl_trains_a_missing_token_with_ratio_1(trl_loss: type[TrlLoss]) -> None:
    nan = float("nan")
    value, found = gradient(trl_loss, micro_batch([-1.5, nan, nan, 0.0], [0, 1, 3, -1]))
    recorded = torch.tensor(0.5).exp().item()
    assert value == pytest.approx(recorded + 2.0)
    assert found == pytest.approx([recorded, 1.0, 0.0, 1.0])


def test_trl_takes_the_log_probability_of_a_sample_that_begins_alike(trl_loss: type[TrlLoss]) -> None:
    value, found = gradient(trl_loss, micro_batch([-1.5, float("nan")], [0, 0]))
    recorded = torch.tensor(0.5).exp().item()
    assert [value, found[0]] == pytest.approx([2 * recorded] * 2)


def test_trl_counts_a_missing_token_for_each_sample_that_has_it(trl_loss: type[TrlLoss]) -> None:
    value, found = gradient(trl_loss, micro_batch([float("nan")] * 3, [1, 1, 2]))
    assert (value, found) == (3.0, [0.0, 2.0, 1.0, 0.0])


def test_trl_is_left_alone_where_nothing_is_missing(trl_loss: type[TrlLoss]) -> None:
    inputs = micro_batch([-1.5, -2.5], [0, 1])
    assert gradient(trl_loss, inputs) == gradient(TrlLoss, inputs)


def test_trl_gets_samples_whose_missing_log_probabilities_are_nan() -> None:
    steps = [replace(step, reward=float(n)) for n in (0, 1) for step in two_turns(f"t{n}", 5 + n)]
    samples = samples_of(choose_rows(make_batch(pack(steps), [4]), ()), 0, PolicyVersions())
    assert [np.isnan(sample.old_log_probs).tolist() for sample in samples] == [[False] * 5 + [True] * 2] * 2
