"""What TRL is given, and what the pool is told of it; with TRL itself it is tested in tests/e2e/test_trl.py."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from stepwell.trainers.trl_groups import RolloutSample

from rig.waiting import wait_until
from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.steps.step import VersionSpan
from stepwell.trainers import trl
from stepwell.trainers.transfers import Weights, stream_weights
from stepwell.trainers.trl import StepwellRolloutWorker, StepwellWeightTransfer
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool


def add_group(
    pool: TrainingPool, prompt: str, rewards: tuple[float | None, ...] = (1.0, 0.0), version: int = 0
) -> None:
    uids = [f"{prompt}-{i}" for i in range(len(rewards))]
    turns = [[one_turn(uid, prompt, [1, 2], [3, 4], policy_version=version)] for uid in uids]
    pool.add_group(prompt, list(zip(turns, rewards, strict=True)))


@contextmanager
def working(pool: TrainingPool, samples_ahead: int = 128) -> Iterator[StepwellRolloutWorker]:
    worker = StepwellRolloutWorker(pool, samples_ahead=samples_ahead)
    worker.resume(None)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def take(worker: StepwellRolloutWorker, count: int) -> list[RolloutSample]:
    return [worker.rollout_buffer.get(timeout=10) for _ in range(count)]


def test_a_sample_is_a_row_with_its_rollouts_advantage() -> None:
    pool = TrainingPool()
    add_group(pool, "p")

    with working(pool) as worker:
        good, bad = take(worker, 2)

    assert good.input_ids.tolist() == [1, 2, 3, 4]
    assert good.completion_mask.tolist() == [0, 0, 1, 1]
    assert good.old_log_probs.tolist() == [0, 0, -2, -2]
    assert good.group_id == bad.group_id
    assert good.advantage == pytest.approx(0.5**0.5, abs=1e-3)
    assert bad.advantage == -good.advantage


def test_a_rollout_in_two_rows_is_two_samples_with_one_advantage() -> None:
    pool = TrainingPool()
    forked = [one_turn("a", "p", [1, 2], [3]), one_turn("a", "p", [5, 6, 8], [7])]
    pool.add_group("p", [(forked, 1.0), ([one_turn("b", "p", [1], [2])], 0.0)])

    with working(pool) as worker:
        first, second, other = take(worker, 3)

    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([1, 2, 3], [5, 6, 8, 7])
    assert first.advantage == second.advantage == -other.advantage
    assert worker.metrics_queue.get_nowait()["reward"] == (1.0, 2.0)


def test_no_more_samples_wait_than_was_said_and_it_can_stop_then() -> None:
    pool = TrainingPool()
    for prompt in "pqr":
        add_group(pool, prompt)

    with working(pool, samples_ahead=3) as worker:
        wait_until(worker.rollout_buffer.full, "the buffer to be full")

    assert worker.rollout_buffer.qsize() == 3
    assert pool.acknowledged == []
    assert len(pool.given_back) == 2, "all that was leased"


def test_many_ready_groups_come_in_few_calls_and_what_was_not_delivered_is_returned() -> None:
    pool = TrainingPool()
    for number in range(20):
        add_group(pool, f"p{number}")

    with working(pool, samples_ahead=16) as worker:
        wait_until(worker.rollout_buffer.full, "the buffer to be full")
        order = [sample.group_id for sample in take(worker, 16)]
        wait_until(worker.rollout_buffer.full, "the buffer to be full again")

    assert order == [group for group in range(8) for _ in range(2)]
    assert pool.local.transport.takes == ["take", *["take_several"] * 4], "1 group, then 4 at a time"
    assert len(pool.given_back) == len(pool.leases) == 17
    assert pool.held == 40


def test_groups_in_which_all_earned_the_same_count_for_the_reward_and_are_not_trained() -> None:
    pool = TrainingPool()
    add_group(pool, "p", rewards=(1.0, 1.0))

    with working(pool) as worker:
        wait_until(lambda: worker.metrics_queue.qsize() == 1, "the group to be seen")
        assert worker.progress.state()["trajectories"] == ["p-0", "p-1"], "a checkpoint contains it"
        worker.commit()

    assert pool.acknowledged == ["lease-1"]
    assert worker.rollout_buffer.empty()
    noted = worker.metrics_queue.get_nowait()
    assert (noted["reward"], noted["unlearnable_groups"]) == ((2.0, 2.0), (1.0, 1.0))


def test_a_group_whose_lease_ran_out_is_not_given_again() -> None:
    pool = TrainingPool()
    add_group(pool, "p")

    with working(pool) as worker:
        wait_until(lambda: worker.rollout_buffer.qsize() == 2, "the samples")
        pool.advance_to(1000.0)
        wait_until(lambda: worker.metrics_queue.qsize() == 1 and len(pool.leases) > 1, "the group to come back")
        take(worker, 2)

    assert worker.rollout_buffer.empty()
    assert worker.metrics_queue.qsize() == 1, "its reward counts once"


def test_versions_are_trls_and_those_of_the_groups_oldest_token() -> None:
    pool = TrainingPool()
    pool.set_policy_version(41)
    spans = (VersionSpan(40, 0, 1), VersionSpan(41, 1, 2))
    mixed = one_turn("a", "p", [1, 2], [3, 4], policy_version=40, version_spans=spans)
    pool.add_group("p", [([mixed], 1.0), ([one_turn("b", "p", [1, 2], [3, 4], policy_version=41)], 0.0)])
    worker = StepwellRolloutWorker(pool)
    worker.update_model_version(3)
    worker.resume(None)

    worker.start()
    samples = take(worker, 2)
    worker.stop()

    assert [sample.model_version for sample in samples] == [2, 2]


def test_a_worker_without_its_callback_does_not_start() -> None:
    with pytest.raises(BadRequest, match="StepwellCallback"):
        StepwellRolloutWorker(TrainingPool()).start()


def test_what_ended_the_worker_is_raised_where_trl_asks(caplog: pytest.LogCaptureFixture) -> None:
    pool = TrainingPool()

    def is_over() -> bool:
        worker.check_health(60)
        return False

    with working(pool) as worker:
        worker.check_health(60)
        pool.local.away = True
        with pytest.raises(PoolUnavailable, match="the pool is away"):
            wait_until(is_over, "the worker to fail")
    assert "the pool is away" in caplog.text


def test_a_worker_that_waits_for_long_says_for_what(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> bool:
        worker.check_health(60)
        return "TRL waits: " in caplog.text

    with working(TrainingPool()) as worker:
        wait_until(lambda: bool(worker._missing), "the worker to miss something")
        assert not said(), "it has not waited for long"
        monkeypatch.setattr(trl, "SAID_EVERY", 0.0)
        assert said()


class NotedSync:
    def __init__(self, pool: TrainingPool) -> None:
        self.synced: list[tuple[list[str], int]] = []
        self._pool = pool

    def sync(self, weights: Weights, version: int) -> None:
        self.synced.append(([name for name, _ in stream_weights(weights)], version))
        self._pool.set_policy_version(version)


def test_weights_are_synced_as_the_pools_next_version() -> None:
    pool = TrainingPool()
    pool.set_policy_version(7)
    sync = NotedSync(pool)
    transfer = StepwellWeightTransfer(sync, pool)

    transfer.init_weight_transfer()
    for _ in range(2):
        transfer.pause()
        transfer.send_weights(iter([("a", torch.zeros(1)), ("b", torch.zeros(1))]))
        transfer.resume()
    transfer.destroy()

    assert sync.synced == [(["a", "b"], 8), (["a", "b"], 9)]
