"""On request, groups that teach nothing are replaced before an update, and rollouts without an end are left out."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.errors import NothingLearned, PoolUnavailable
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import CUT_SHORT
from stepwell.trainers.feed import join_batches
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trainer import AsyncTrainer
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

TEACHES, EQUAL = (1.0, 0.0), (1.0, 1.0)


def refilling(**settings: Any) -> Settings:
    return Settings(**{"groups": 2, "updates": 6, "learning_rate": 1e-2, "lease": 60.0, "max_refills": 3} | settings)


def filled(*groups: tuple[float, ...], pool: TrainingPool | None = None) -> TrainingPool:
    """Groups with these rewards."""
    pool = pool or TrainingPool()
    for number, rewards in enumerate(groups):
        turns = [[one_turn(f"{number}-{r}", f"p{number}", [1, number], [3 + r, 6])] for r in range(len(rewards))]
        pool.add_group(f"p{number}", list(zip(turns, rewards, strict=True)))
    return pool


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def test_groups_that_teach_nothing_are_replaced_and_counted_by_cause() -> None:
    pool = filled(EQUAL, TEACHES, EQUAL, TEACHES, TEACHES)
    metrics = AsyncTrainer(pool, Recurrent(), settings=refilling()).step()
    assert (metrics.refills, metrics.groups_equal, metrics.groups_identical) == (2, 2, 0)
    assert (metrics.rollouts, metrics.rollouts_trained) == (8, 4)
    assert metrics.reward == pytest.approx(6 / 8), "of all groups that were fetched"
    assert pool.acknowledged == ["lease-1", "lease-2", "lease-3"]
    assert pool.held == 2, "the last group waits for the next update"


def test_an_update_is_that_of_a_batch_with_only_the_groups_that_teach() -> None:
    """The prompts are the same, only the order in which groups arrive is not."""
    refilled, at_once = Recurrent(), Recurrent()
    AsyncTrainer(filled(EQUAL, TEACHES, EQUAL, TEACHES), refilled, settings=refilling()).step()
    pool = filled(EQUAL, TEACHES, EQUAL, TEACHES)
    AsyncTrainer(pool, at_once, settings=refilling(groups=4, max_refills=0)).step()
    for some, others in zip(weights(refilled), weights(at_once), strict=True):
        torch.testing.assert_close(some, others)


def test_without_refills_an_update_has_what_one_fetch_gave() -> None:
    metrics = AsyncTrainer(filled(EQUAL, TEACHES, TEACHES), Recurrent(), settings=refilling(max_refills=0)).step()
    assert (metrics.refills, metrics.groups_equal, metrics.rollouts_trained) == (0, 1, 2)


def test_refills_end_at_their_bound() -> None:
    pool = filled(*[EQUAL] * 10, TEACHES)
    model = Recurrent()
    before = weights(model)
    metrics = AsyncTrainer(pool, model, settings=refilling(max_refills=2)).step()
    assert (metrics.refills, metrics.groups_equal, metrics.tokens) == (2, 6, 0)
    assert all(torch.equal(some, others) for some, others in zip(before, weights(model), strict=True))
    assert pool.held == 10


def test_a_run_that_finds_nothing_to_learn_still_ends() -> None:
    settings = refilling(max_refills=1, max_unlearnable=2)
    with pytest.raises(NothingLearned, match="8 groups whose rollouts all have the same return"):
        AsyncTrainer(filled(*[EQUAL] * 8), Recurrent(), settings=settings).run()


def test_if_there_are_no_more_groups_in_time_the_others_are_trained(caplog: pytest.LogCaptureFixture) -> None:
    pool = filled(EQUAL, TEACHES)
    with caplog.at_level(logging.WARNING):
        metrics = AsyncTrainer(pool, Recurrent(), settings=refilling()).step()
    assert (metrics.refills, metrics.rollouts_trained) == (0, 2)
    assert "1 groups teach nothing and are not replaced" in caplog.text
    assert pool.held == 0


class AwayAtSecondFetch(TrainingPool):
    def fetch_batch(self, count: int, **terms: Any) -> Any:
        if self.leases:
            raise PoolUnavailable("away")
        return super().fetch_batch(count, **terms)


def test_a_refill_that_fails_gives_back_what_was_fetched() -> None:
    pool = filled(EQUAL, TEACHES, pool=AwayAtSecondFetch())
    with pytest.raises(PoolUnavailable):
        AsyncTrainer(pool, Recurrent(), settings=refilling()).step()
    assert pool.given_back == ["lease-1"]


def test_what_was_fetched_for_one_update_is_in_one_checkpoint(tmp_path: Path) -> None:
    pool = filled(EQUAL, TEACHES, TEACHES, TEACHES, TEACHES)
    trainer = AsyncTrainer(pool, Recurrent(), settings=refilling(), checkpoints=tmp_path)
    pool.dies_at_ack = True
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    pool.dies_at_ack = False
    pool.advance_to(1000.0)
    again = AsyncTrainer(pool, Recurrent(seed=5), settings=refilling(), checkpoints=tmp_path)
    metrics = again.step()
    assert (again.update, metrics.rollouts_trained) == (2, 4)
    assert pool.held == 0


def test_joined_batches_are_the_batch_of_all_their_groups() -> None:
    def rows(number: int) -> list[Any]:
        uids = [f"{number}-{r}" for r in range(2)]
        return [
            *[one_turn(uids[0], f"p{number}", [1, *[2, 3] * turn], [2], step_index=turn) for turn in range(2)],
            one_turn(uids[1], f"p{number}", [1], [4, 5], reward=float(number)),
        ]

    parts = [make_batch(pack(rows(number)), [3], leases=(("s", f"l{number}"),)) for number in range(3)]
    joined, whole = join_batches(parts), make_batch(pack([step for n in range(3) for step in rows(n)]), [3, 3, 3])
    assert joined.leases == (("s", "l0"), ("s", "l1"), ("s", "l2"))
    assert joined.trajectory_of_S.tolist() == whole.trajectory_of_S.tolist()
    assert joined.group_of_T.tolist() == whole.group_of_T.tolist()
    ours, theirs = (
        choose_rows(joined, (), RowSettings(baseline="batch")),
        choose_rows(whole, (), RowSettings(baseline="batch")),
    )
    assert ours.advantages.tolist() == theirs.advantages.tolist()
    assert ours.merged.tokens.tolist() == theirs.merged.tokens.tolist()
    assert ours.tokens == theirs.tokens > 0


# -- rollouts without an end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["length", CUT_SHORT])
def test_a_rollout_whose_last_step_has_no_end_is_left_out_and_counts_in_the_baseline(reason: str) -> None:
    def rollout(number: int, reward: float, *ends: str) -> list[Any]:
        return [
            one_turn(f"t{number}", "p", [1, *[2] * 3 * turn], [2], step_index=turn, finish_reason=end, reward=reward)
            for turn, end in enumerate(ends)
        ]

    rollouts = [rollout(0, 1.0, reason, "stop"), rollout(1, 0.0, "stop", reason), rollout(2, 0.5, "stop")]
    batch = make_batch(pack([step for steps in rollouts for step in steps]), [5])
    kept, every = choose_rows(batch, (), RowSettings(filter_overlong=True)), choose_rows(batch, ())
    trained = {kept.uids_T[t] for t in kept.merged.trajectory_of_R[kept.chosen_R].tolist()}
    assert trained == {"t0", "t2"}
    assert (kept.left_out.rollouts_overlong, every.left_out.rollouts_overlong) == (1, 0)
    assert kept.advantages[kept.trained].tolist() == every.advantages[kept.trained].tolist()


def test_a_group_in_which_only_rollouts_without_an_end_differ_is_replaced() -> None:
    pool = TrainingPool()
    for number, ends in enumerate((("length", "length"), ("stop", "length"), ("stop", "stop"))):
        rollouts = [
            ([one_turn(f"{number}-{r}", f"p{number}", [1], [3 + r], finish_reason=end)], float(r))
            for r, end in enumerate(ends)
        ]
        pool.add_group(f"p{number}", rollouts)
    metrics = AsyncTrainer(pool, Recurrent(), settings=refilling(filter_overlong=True)).step()
    assert (metrics.refills, metrics.rollouts_overlong, metrics.rollouts_trained) == (1, 3, 3)
