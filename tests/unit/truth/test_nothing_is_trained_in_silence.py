"""T4: a trainer that gets groups from which nothing can be learned says so, counts them, and stops after some.

Groups of one rollout were acknowledged for ever while the weights stayed the same.
"""

import logging

import pytest

from rig.waiting import wait_until
from stepwell.errors import NothingLearned
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.trl import StepwellRolloutWorker
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

SETTINGS = Settings(groups=1, updates=100, max_unlearnable=3, fallback_baseline="none")


def add_group(pool: TrainingPool, prompt: str, *rewards: float | None) -> None:
    """Of rollouts with different answers."""
    turns = [[one_turn(f"{prompt}-{n}", prompt, [1, 2], [3 + n])] for n in range(len(rewards))]
    pool.add_group(prompt, list(zip(turns, rewards, strict=True)))


def singles(count: int) -> TrainingPool:
    pool = TrainingPool()
    for number in range(count):
        add_group(pool, f"p{number}", 1.0)
    return pool


def test_the_first_group_that_teaches_nothing_is_reported_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    trainer = AsyncTrainer(singles(2), Recurrent(), settings=SETTINGS)

    with caplog.at_level(logging.WARNING):
        metrics = [trainer.step(), trainer.step()]

    assert [update.groups_single for update in metrics] == [1, 1]
    assert caplog.text.count("which baseline group or leave_one_out compares with nothing are not trained") == 1
    assert caplog.text.count("nothing can be learned from this data") == 1
    assert "set fallback_baseline to running" in caplog.text
    assert "prompt_uid" in caplog.text


def test_after_some_batches_in_a_row_the_run_stops_and_says_what_to_do() -> None:
    pool = singles(5)

    told = r"from 3 batches in a row: 3 groups of one .* To do: set fallback_baseline to running .*prompt_uid"
    with pytest.raises(NothingLearned, match=told):
        AsyncTrainer(pool, Recurrent(), settings=SETTINGS).run()

    assert pool.acknowledged == ["lease-1", "lease-2", "lease-3"]


def test_a_batch_that_teaches_something_starts_the_count_again() -> None:
    pool = singles(2)
    add_group(pool, "q", 1.0, 0.0)
    add_group(pool, "r", 1.0)
    add_group(pool, "s", 1.0)

    trainer = AsyncTrainer(pool, Recurrent(), settings=SETTINGS)
    trainer.run(5)

    assert trainer.update == 5


@pytest.mark.parametrize(
    ("rewards", "remedy"), [((1.0, 1.0), "check that the reward"), ((None, None), "give each rollout a reward")]
)
def test_the_remedy_is_that_for_the_most_frequent_reason(rewards: tuple[float | None, ...], remedy: str) -> None:
    pool = TrainingPool()
    for prompt in "abc":
        add_group(pool, prompt, *rewards)
    with pytest.raises(NothingLearned, match=remedy):
        AsyncTrainer(pool, Recurrent(), settings=SETTINGS).run()


def test_rollouts_that_are_the_same_token_for_token_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """T11: so they are with a fixed seed."""
    pool = TrainingPool()
    pool.add_group("p", [([one_turn(f"t{n}", "p", [1, 2], [3, 4])], 1.0) for n in range(4)])

    metrics = AsyncTrainer(pool, Recurrent(), settings=SETTINGS).step()

    assert (metrics.groups_identical, metrics.groups_equal) == (1, 0)
    assert "without a fixed seed" in caplog.text


def test_a_loader_stops_too(caplog: pytest.LogCaptureFixture) -> None:
    pool = singles(5)

    with pytest.raises(NothingLearned, match="from 3 batches in a row"):
        list(pool_loader(pool, 1, max_unlearnable=3))

    assert caplog.text.count("nothing can be learned from this data") == 1
    assert len(pool.acknowledged) == 3


def test_trl_is_stopped_too() -> None:
    worker = StepwellRolloutWorker(singles(5), max_unlearnable=3)

    def is_over() -> bool:
        worker.check_health(60)
        return False

    worker.resume(None)
    worker.start()
    with pytest.raises(NothingLearned, match="from 3 groups in a row"):
        wait_until(is_over, "the worker to give up")
    worker.stop()


def test_without_a_limit_nothing_stops() -> None:
    trainer = AsyncTrainer(singles(30), Recurrent(), settings=Settings(groups=1, max_unlearnable=None))
    trainer.run(30)
    assert trainer.update == 30
