import subprocess
import sys
from itertools import islice

import pytest
import torch

from stepwell.errors import FetchTimeout
from stepwell.trainers.loader import pool_loader
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool


def pool_of(groups: int, *, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> TrainingPool:
    pool = TrainingPool()
    for number in range(groups):
        rollouts = [(f"p{number}-{i}", reward) for i, reward in enumerate(rewards)]
        pool.add_group(
            f"p{number}",
            [([one_turn(uid, f"p{number}", [1, 2], [3, 4, 5][: 2 + i])], r) for i, (uid, r) in enumerate(rollouts)],
        )
    return pool


def test_a_batch_is_tensors_of_one_shape() -> None:
    (batch,) = pool_loader(pool_of(1), 1, batches=1)

    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 0], [1, 2, 3, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["trained"].tolist() == [[False, False, True, True, False], [False, False, True, True, True]]
    assert batch["logprobs"].tolist() == [[0, 0, -2, -2, 0], [0, 0, -2, -2, -2]]
    half = 0.5**0.5
    torch.testing.assert_close(
        batch["advantages"], torch.tensor([[0, 0, half, half, 0], [0, 0, -half, -half, -half]]), rtol=0, atol=1e-3
    )
    assert batch["reward"].item() == 0.5


def test_a_batch_is_acknowledged_when_the_next_one_is_asked_for() -> None:
    pool = pool_of(2)
    batches = iter(pool_loader(pool, 1, batches=2))

    next(batches)
    assert pool.acknowledged == []
    next(batches)
    assert pool.acknowledged == ["lease-1"]
    assert next(batches, None) is None
    assert pool.acknowledged == ["lease-1", "lease-2"]


def test_a_loop_that_is_left_gives_its_batch_back() -> None:
    pool = pool_of(2)

    for _ in islice(pool_loader(pool, 1), 1):
        pass

    assert (pool.acknowledged, pool.given_back) == ([], ["lease-1"])


def test_a_loop_that_fails_gives_its_batch_back() -> None:
    pool = pool_of(1)

    with pytest.raises(RuntimeError, match="out of memory"):
        for _ in pool_loader(pool, 1):
            raise RuntimeError("out of memory")

    assert (pool.acknowledged, pool.given_back) == ([], ["lease-1"])


def test_a_batch_with_nothing_to_learn_is_passed_over() -> None:
    pool = pool_of(1, rewards=(1.0, 1.0))
    pool.add_group("q", [([one_turn(f"q-{i}", "q", [1], [2])], reward) for i, reward in enumerate((1.0, 0.0))])

    (batch,) = pool_loader(pool, 1, batches=1)

    assert batch["input_ids"].tolist() == [[1, 2], [1, 2]]
    assert pool.acknowledged == ["lease-1", "lease-2"]


def test_the_reward_is_that_of_the_whole_batch() -> None:
    pool = pool_of(1, rewards=(1.0, 1.0))
    pool.add_group("q", [([one_turn(f"q-{i}", "q", [1], [2])], reward) for i, reward in enumerate((1.0, 0.0))])

    (batch,) = pool_loader(pool, 2, batches=1)

    assert len(batch["input_ids"]) == 2
    assert batch["reward"].item() == 0.75


def test_a_batch_that_comes_back_is_not_given_again(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(1)
    batches = iter(pool_loader(pool, 1, lease=10))

    next(batches)
    pool.advance_to(11)
    with pytest.raises(FetchTimeout):
        next(batches)

    assert "comes back and is skipped" in caplog.text
    assert pool.acknowledged == ["lease-1", "lease-2"]


LEFT_OPEN = """
import threading
from stepwell.trainers.loader import pool_loader
from tests.unit.trainers.test_loader import pool_of

pool = pool_of(1)
pool.nack = lambda batch: threading.Event().wait()
batches = iter(pool_loader(pool, 1))
next(batches)
"""


def test_a_loader_left_open_does_not_keep_its_process_from_ending() -> None:
    subprocess.run([sys.executable, "-c", LEFT_OPEN], timeout=300, check=True)
