"""The training loop over the pool's own rules: what it learns, and what it does when it is interrupted anywhere."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.errors import BadRequest, SyncFailed
from stepwell.trainers.reporting import UpdateMetrics
from stepwell.trainers.settings import Settings, default_rate
from stepwell.trainers.trainer import AsyncTrainer, read_checkpoint
from stepwell.trainers.transfers import TensorState
from tests.unit.trainers.models import VOCABULARY, Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

RATE = 1e-2
SETTINGS = Settings(groups=2, updates=6, learning_rate=RATE, lease=60.0)
BOTH = SETTINGS.groups


def filled(groups: int, **step: Any) -> TrainingPool:
    """Groups of four rollouts, of which those earn something that say 3."""
    pool = TrainingPool()
    for g in range(groups):
        answers = [3, 4, 3 + g % 3, 5]
        rollouts = [
            ([one_turn(f"{g}-{r}", f"p{g}", [g % VOCABULARY, r], [answer, 6], **step)], float(answer == 3))
            for r, answer in enumerate(answers)
        ]
        pool.add_group(f"p{g}", rollouts)
    return pool


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@dataclass(frozen=True)
class Synced:
    version: int
    logprob_gap: float | None = 1e-6
    restore: TensorState | None = None


class SyncLog:
    def __init__(self, pool: TrainingPool) -> None:
        self.versions: list[int] = []
        self.pool = pool
        self.fails = False

    def sync(self, weights: torch.nn.Module, version: int) -> Synced:
        if self.fails:
            raise SyncFailed("told to")
        self.versions.append(version)
        self.pool.set_policy_version(version)
        return Synced(version)


def test_what_earns_more_becomes_likelier() -> None:
    pool, model = filled(12), Recurrent()
    seen: list[UpdateMetrics] = []
    AsyncTrainer(pool, model, settings=SETTINGS, reports=[seen.append]).run()
    assert [metrics.update for metrics in seen] == [1, 2, 3, 4, 5, 6]
    assert pool.held == 0
    ids = torch.tensor([[0, 0]])
    after = model(input_ids=ids, attention_mask=None).logits[0, -1].softmax(-1)
    before = Recurrent()(input_ids=ids, attention_mask=None).logits[0, -1].softmax(-1)
    assert after[3] > 1.1 * before[3]


def test_metrics_tell_what_was_trained() -> None:
    pool = TrainingPool()
    pool.add_group("same", [([one_turn(f"s{r}", "same", [1], [2])], 1.0) for r in range(3)])
    ends = ("stop", "length")
    rollouts = [
        ([one_turn(f"d{r}", "differ", [1], [2, 3], policy_version=4, finish_reason=end)], float(r))
        for r, end in enumerate(ends)
    ]
    pool.add_group("differ", rollouts)
    metrics = AsyncTrainer(pool, Recurrent(), settings=SETTINGS).step()
    assert (metrics.rollouts, metrics.rollouts_trained, metrics.rows, metrics.tokens) == (5, 2, 2, 4)
    assert metrics.reward == pytest.approx(0.8)
    assert metrics.learning_rate == RATE
    assert metrics.gradient_norm > 0
    assert metrics.staleness == 0.0
    assert metrics.truncated == pytest.approx(1 / 5)
    assert (metrics.groups_identical, metrics.groups_single) == (1, 0)


def test_the_learning_rate_falls_in_a_straight_line_to_its_share() -> None:
    pool = filled(12)
    trainer = AsyncTrainer(pool, Recurrent(), settings=SETTINGS)
    rates = [trainer.step().learning_rate / RATE for _ in range(6)]
    assert rates == pytest.approx([1 - 0.15 * update for update in range(6)])


def test_a_larger_model_gets_a_smaller_learning_rate_unless_one_is_set(caplog: pytest.LogCaptureFixture) -> None:
    small, large = Recurrent(), Recurrent()
    large.unused = torch.nn.Parameter(torch.zeros(2_000_000))
    adapter = Recurrent()
    adapter.frozen = torch.nn.Parameter(torch.zeros(2_000_000), requires_grad=False)
    unset = replace(SETTINGS, learning_rate=None)
    rates = [AsyncTrainer(filled(2), model, settings=unset).step().learning_rate for model in (small, large, adapter)]
    assert rates == [5e-4, 5e-5, 5e-4]
    assert [line.split(" is used")[0] for line in (record.getMessage() for record in caplog.records)] == [
        f"no learning_rate is set: {rate}" for rate in ("0.0005", "5e-05", "0.0005")
    ]
    assert AsyncTrainer(filled(2), large, settings=SETTINGS).step().learning_rate == RATE


@pytest.mark.parametrize(("parameters", "rate"), [(330_000, 5e-4), (500_000_000, 3e-6), (7_000_000_000, 1e-6)])
def test_a_model_of_a_billion_parameters_is_trained_as_slowly_as_others_do(parameters: int, rate: float) -> None:
    assert default_rate(parameters) == rate


def test_the_learning_rate_rises_over_the_first_updates() -> None:
    settings = replace(SETTINGS, final_rate=1.0, warmup_updates=3)
    trainer = AsyncTrainer(filled(12), Recurrent(), settings=settings)
    rates = [trainer.step().learning_rate / RATE for _ in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_many_small_passes_make_the_update_of_one() -> None:
    one, many = Recurrent(), Recurrent()
    AsyncTrainer(filled(2), one, settings=SETTINGS).step()
    AsyncTrainer(filled(2), many, settings=Settings(groups=2, updates=6, learning_rate=1e-2, tokens_per_pass=1)).step()
    for some, others in zip(weights(one), weights(many), strict=True):
        torch.testing.assert_close(some, others, atol=1e-5, rtol=1e-4)


def test_a_batch_from_which_nothing_is_learnt_changes_no_weight_and_is_consumed() -> None:
    pool, model = TrainingPool(), Recurrent()
    for prompt in ("a", "b"):
        pool.add_group(prompt, [([one_turn(f"{prompt}{r}", prompt, [1], [2])], 1.0) for r in range(2)])
    sync, before = SyncLog(pool), weights(model)
    metrics = AsyncTrainer(pool, model, settings=SETTINGS, sync=sync).step()
    assert metrics.gradient_norm == metrics.tokens == 0
    assert same(before, weights(model))
    assert sync.versions == [0]
    assert pool.held == 0


def test_a_reference_holds_the_model_back() -> None:
    def moved(**settings: Any) -> tuple[float, float]:
        model = Recurrent()
        pool = filled(8)
        rules = Settings(groups=2, updates=4, learning_rate=1e-2, **settings)
        trainer = AsyncTrainer(pool, model, settings=rules, reference=Recurrent())
        kl = [trainer.step().kl for _ in range(4)][-1]
        return kl, sum((a - b).abs().sum().item() for a, b in zip(weights(model), weights(Recurrent()), strict=True))

    free, held = moved(), moved(kl_coefficient=100.0)
    assert 0 < held[0] < free[0]
    assert held[1] < free[1]


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(BadRequest, match="reference"):
        AsyncTrainer(TrainingPool(), Recurrent(), settings=Settings(kl_coefficient=0.1))


def test_a_gradient_that_is_no_number_stops_the_run_before_the_weights_change() -> None:
    pool, model = filled(2), Recurrent()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    before = weights(model)
    with pytest.raises(RuntimeError, match="non-finite"):
        AsyncTrainer(pool, model, settings=SETTINGS).step()
    assert all(torch.allclose(a, b, equal_nan=True) for a, b in zip(before, weights(model), strict=True))
    assert pool.given_back == ["lease-1"]


# -- weights to the engines ------------------------------------------------------------------------------------------


def test_every_update_brings_a_version_to_the_engines_beginning_with_the_first_weights() -> None:
    pool = filled(6)
    sync = SyncLog(pool)
    trainer = AsyncTrainer(pool, Recurrent(), settings=SETTINGS, sync=sync)
    assert [trainer.step().version for _ in range(3)] == [1, 2, 3]
    assert sync.versions == [0, 1, 2, 3]


def test_weights_are_synced_as_often_as_is_asked() -> None:
    pool = filled(8)
    sync = SyncLog(pool)
    rules = Settings(groups=2, updates=4, sync_every=2)
    AsyncTrainer(pool, Recurrent(), settings=rules, sync=sync).run()
    assert sync.versions == [0, 1, 2]


def test_a_sync_that_fails_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    pool = filled(2)
    sync = SyncLog(pool)
    trainer = AsyncTrainer(pool, Recurrent(), settings=SETTINGS, sync=sync, checkpoints=tmp_path)
    trainer.start()
    sync.fails = True
    with pytest.raises(SyncFailed):
        trainer.step()
    again, sync.fails = AsyncTrainer(pool, Recurrent(), settings=SETTINGS, sync=sync, checkpoints=tmp_path), False
    again.start()
    assert same(weights(trainer.model), weights(again.model))
    assert sync.versions == [0, 1]


def test_a_run_that_fell_behind_the_pool_gives_its_weights_a_version_of_their_own(tmp_path: Path) -> None:
    """With a checkpoint every other update, weights that the engines had can be lost; their number is not."""
    pool = filled(6)
    sync = SyncLog(pool)
    rules = Settings(groups=2, updates=6, checkpoint_every=2)
    trainer = AsyncTrainer(pool, Recurrent(), settings=rules, sync=sync, checkpoints=tmp_path)
    for _ in range(3):
        trainer.step()
    again = AsyncTrainer(pool, Recurrent(), settings=rules, sync=sync, checkpoints=tmp_path)
    again.start()
    assert (again.update, again.version) == (2, 4)
    assert sync.versions == [0, 1, 2, 3, 4]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, broken = filled(12), filled(12)
    through = AsyncTrainer(whole, Recurrent(dropout=0.3), settings=SETTINGS)
    through.run()
    AsyncTrainer(broken, Recurrent(dropout=0.3), settings=SETTINGS, checkpoints=tmp_path).run(3)
    resumed = AsyncTrainer(broken, Recurrent(seed=9, dropout=0.3), settings=SETTINGS, checkpoints=tmp_path)
    torch.manual_seed(123)
    resumed.run()
    assert resumed.update == 6
    assert same(weights(through.model), weights(resumed.model))


def test_a_batch_is_acknowledged_only_with_the_checkpoint_that_contains_it(tmp_path: Path) -> None:
    pool = filled(6)
    rules = Settings(groups=2, updates=3, checkpoint_every=2)
    trainer = AsyncTrainer(pool, Recurrent(), settings=rules, checkpoints=tmp_path)
    trainer.step()
    assert pool.acknowledged == []
    trainer.step()
    assert pool.acknowledged == ["lease-1", "lease-2"]
    trainer.run()
    assert pool.acknowledged == ["lease-1", "lease-2", "lease-3"]


@pytest.mark.parametrize("seconds", [1.0, 1000.0], ids=["the lease holds", "the lease ran out"])
def test_what_a_checkpoint_contains_is_not_trained_again_by_whoever_resumes(tmp_path: Path, seconds: float) -> None:
    pool = filled(4)
    trainer = AsyncTrainer(pool, Recurrent(), settings=SETTINGS, checkpoints=tmp_path)
    pool.dies_at_ack = True
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    pool.dies_at_ack = False
    pool.advance_to(seconds)
    again = AsyncTrainer(pool, Recurrent(seed=5), settings=SETTINGS, checkpoints=tmp_path)
    seen = again.step()
    assert (again.update, seen.rollouts_trained) == (2, 8)
    assert pool.held == 0
    reference = AsyncTrainer(filled(4), Recurrent(), settings=SETTINGS)
    reference.run(2)
    assert same(weights(again.model), weights(reference.model))


def test_what_no_checkpoint_contains_is_trained_again_from_the_weights_before_it(tmp_path: Path) -> None:
    pool = filled(6)
    rules = Settings(groups=2, updates=6, learning_rate=1e-2, checkpoint_every=2)
    trainer = AsyncTrainer(pool, Recurrent(), settings=rules, checkpoints=tmp_path)
    for _ in range(3):
        trainer.step()
    pool.advance_to(1000.0)
    again = AsyncTrainer(pool, Recurrent(), settings=rules, checkpoints=tmp_path)
    again.run(3)
    assert pool.held == 0
    assert same(weights(trainer.model), weights(again.model))


def test_a_lease_that_runs_out_while_training_costs_nothing_but_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = filled(4)
    rules = Settings(groups=2, updates=6, checkpoint_every=2, lease=5.0)
    trainer = AsyncTrainer(pool, Recurrent(), settings=rules, checkpoints=tmp_path)
    trainer.step()
    pool.advance_to(10.0)
    with caplog.at_level(logging.WARNING):
        metrics = trainer.step()
    assert "comes back and is skipped" in caplog.text
    assert metrics.update == 2
    assert metrics.rollouts_trained == 8
    assert pool.held == 0


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"something": 1}, tmp_path / "trainer.pt")
    with pytest.raises(BadRequest, match=r"trainer.pt is not a checkpoint"):
        AsyncTrainer(TrainingPool(), Recurrent(), settings=SETTINGS, checkpoints=tmp_path).start()


def test_what_a_killed_trainer_left_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    (tmp_path / "trainer.pt.12345.part").write_bytes(b"half")
    trainer = AsyncTrainer(filled(BOTH), Recurrent(), settings=SETTINGS, checkpoints=tmp_path)
    trainer.step()
    assert [file.name for file in tmp_path.iterdir()] == ["trainer.pt"]


class Guarding(SyncLog):
    """Does not let version 2 through, and knows of a version 7 that this trainer has not made."""

    def __init__(self, pool: TrainingPool, stable: TensorState) -> None:
        super().__init__(pool)
        self.stable = stable

    def sync(self, weights: torch.nn.Module, version: int) -> Synced:
        super().sync(weights, version)
        return Synced(max(7, version), restore=self.stable if len(self.versions) == 2 else None)


def test_the_learning_rate_rises_again_for_the_new_optimizer() -> None:
    pool = filled(12)
    guard = Guarding(pool, dict(Recurrent(seed=5).state_dict()))
    settings = replace(SETTINGS, final_rate=1.0, warmup_updates=1)
    trainer = AsyncTrainer(pool, Recurrent(), settings=settings, sync=guard)
    rates = [trainer.step().learning_rate / RATE for _ in range(3)]
    assert rates == pytest.approx([0.5, 0.5, 1.0]), "the first update was not let through"


def test_a_trainer_whose_weights_are_not_let_through_starts_again(tmp_path: Path) -> None:
    pool, model, stable = filled(4), Recurrent(), Recurrent(seed=5)
    guard = Guarding(pool, dict(stable.state_dict()))
    trainer = AsyncTrainer(pool, model, settings=SETTINGS, sync=guard, checkpoints=tmp_path)
    trainer.step()
    assert same(weights(model), weights(stable))
    assert not trainer._learner.optimizer.state
    assert guard.versions == [0, 8], "the next number is one that nobody had"
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert all(torch.equal(saved.model[name], value) for name, value in stable.state_dict().items())
    trainer.step()
    assert not same(weights(model), weights(stable))
    assert guard.versions == [0, 8, 9]
