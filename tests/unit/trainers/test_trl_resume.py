"""What TRL has trained, what is in its checkpoints, and what a resumed run trains: every group exactly once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.waiting import wait_until
from stepwell.errors import BadRequest
from stepwell.trainers.trl import StepwellRolloutWorker
from stepwell.trainers.trl_callback import StepwellCallback, last_checkpoint
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool
from tests.unit.trainers.trl_loop import NAME, TrlLoop

LEASE = 600.0
Start = Callable[..., TrlLoop]


@pytest.fixture
def start() -> Iterator[Start]:
    loops: list[TrlLoop] = []

    def start(pool: TrainingPool, **terms: Any) -> TrlLoop:
        loops.append(TrlLoop(StepwellRolloutWorker(pool, lease=LEASE), **terms))
        return loops[-1]

    yield start
    for loop in loops:
        loop.kill()


def lose_leases(pool: TrainingPool) -> None:
    pool.advance_to(2 * LEASE)


def pool_of(groups: int, rollouts: int = 2) -> TrainingPool:
    """Rollout n of group g begins with the token 10 g + n."""
    pool = TrainingPool()
    for group in range(groups):
        add_group(pool, group, rollouts)
    return pool


def add_group(pool: TrainingPool, group: int, rollouts: int = 2, version: int = 0) -> None:
    prompt = f"p{group}"
    turns = [
        [one_turn(f"{prompt}-{n}", prompt, [10 * group + n, 2], [3, 4], policy_version=version)]
        for n in range(rollouts)
    ]
    pool.add_group(prompt, [(turn, float(n)) for n, turn in enumerate(turns)])


def trained(*loops: TrlLoop) -> list[int]:
    return sorted(sample for loop in loops for micro_batch in loop.trained for sample in micro_batch)


def test_taken_and_collated_is_not_trained(start: Start) -> None:
    pool = pool_of(3)
    loop = start(pool, save_strategy="no")

    loop.collate(2)
    loop.collate(2)
    assert pool.acknowledged == []
    loop.step()
    assert pool.acknowledged == ["lease-1"]
    assert loop.groups_trained == {0, 1}, "TRL counts what it collated, as without us"
    wait_until(lambda: len(pool.leases) == 3, "all groups to be leased")
    loop.stop()
    assert pool.given_back == ["lease-2", "lease-3"]


def test_a_group_is_acknowledged_when_a_checkpoint_contains_it(start: Start) -> None:
    pool = pool_of(2)
    loop = start(pool)

    loop.update(2)
    loop.write()
    assert pool.acknowledged == [], "the checkpoint may not be whole yet"
    loop.save()
    assert pool.acknowledged == ["lease-1"]
    loop.update(2)
    loop.stop()
    assert pool.acknowledged == ["lease-1"]
    assert pool.given_back == ["lease-2"], "it is in no checkpoint"


def test_a_group_that_teaches_nothing_and_came_after_the_checkpoint_is_not_acknowledged_with_it(start: Start) -> None:
    pool = pool_of(1)
    loop = start(pool)
    loop.update(2)
    loop.write()

    turns = [one_turn(f"equal-{n}", "equal", [n, 2], [3, 4]) for n in range(2)]
    pool.add_group("equal", [([turn], 1.0) for turn in turns])
    wait_until(lambda: loop.worker._groups == 2, "the group to be seen")
    loop.acknowledge()

    assert pool.acknowledged == ["lease-1"]


def test_what_was_trained_after_the_checkpoint_is_trained_again_and_nothing_else(start: Start) -> None:
    pool = pool_of(4)
    killed = start(pool)
    killed.update(2)
    saved = killed.save()
    killed.collate(2)
    killed.step()

    killed.kill()
    lose_leases(pool)
    resumed = start(pool, resume=saved)
    for _ in range(3):
        resumed.update(2)

    assert trained(resumed) == [10, 11, 20, 21, 30, 31]


def test_a_checkpoint_that_was_not_acknowledged_is_acknowledged_at_the_resume(start: Start) -> None:
    pool = pool_of(2)
    killed = start(pool)
    killed.update(2)
    saved = killed.write()

    start(pool, resume=saved)

    assert pool.acknowledged == ["lease-1"]


def test_groups_of_the_checkpoint_whose_leases_ran_out_come_back_and_are_skipped(start: Start) -> None:
    pool = pool_of(2)
    killed = start(pool)
    killed.update(2)
    saved = killed.write()

    killed.kill()
    lose_leases(pool)
    resumed = start(pool, resume=saved)
    resumed.update(2)
    resumed.save()

    assert trained(resumed) == [10, 11]
    assert pool.held == 0


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_the_rest_of_a_group_that_was_begun_is_in_the_checkpoint(start: Start, is_saved_again: bool) -> None:
    pool = pool_of(3)
    killed = start(pool)
    killed.update(3)
    saved = killed.save()
    assert pool.acknowledged == ["lease-1", "lease-2"]

    killed.kill()
    lose_leases(pool)
    resumed = start(pool, resume=saved)
    if is_saved_again:  # before anything was trained
        saved = resumed.save()
        resumed = start(pool_of(3), resume=saved)
    resumed.update(1)

    assert trained(killed, resumed) == [0, 1, 10, 11]
    assert resumed.trained == [[11]]


def test_the_rest_of_a_begun_group_is_what_it_was(start: Start) -> None:
    pool = pool_of(1)
    killed = start(pool)
    killed.update(1)
    (rest,) = killed.take(1)

    resumed = start(pool, resume=killed.save())
    (again,) = resumed.take(1)

    for name in ("input_ids", "completion_mask", "old_log_probs"):
        assert getattr(again, name).tolist() == getattr(rest, name).tolist()
    assert again.advantage == rest.advantage


def test_a_sample_that_trl_drops_does_not_hold_up_its_group(start: Start) -> None:
    """TRL drops samples that are longer than its token budget, after it has taken them."""
    pool = pool_of(3)
    loop = start(pool, save_strategy="no")

    loop.take(1)
    loop.update(1)
    assert pool.acknowledged == ["lease-1"], "it is begun, and will be over"
    loop.update(2)
    assert pool.acknowledged == ["lease-1", "lease-2"]
    wait_until(lambda: len(pool.leases) == 3, "all groups to be leased")
    loop.stop()
    assert pool.given_back == ["lease-3"]


# -- stale groups ------------------------------------------------------------------------------------------------------


def test_a_group_is_stale_as_a_whole_or_not_at_all(start: Start) -> None:
    pool = TrainingPool()
    pool.set_policy_version(4)
    add_group(pool, 0, version=0)
    loop = start(pool, save_strategy="no", max_staleness=4)

    loop.collate(1)
    pool.set_policy_version(5)
    loop.sync()
    loop.collate(1)
    loop.step()
    loop.step()

    assert loop.trained == [[0], [1]]
    loop.stop()


def test_a_group_that_became_stale_in_the_queue_is_dropped_as_a_whole_and_settled_with_the_next(start: Start) -> None:
    pool = TrainingPool()
    pool.set_policy_version(4)
    add_group(pool, 0, version=0)
    loop = start(pool, max_staleness=4)
    wait_until(lambda: loop.worker.rollout_buffer.qsize() == 2, "the samples")
    pool.set_policy_version(5)
    loop.sync()
    add_group(pool, 1, version=5)

    loop.update(2)
    loop.save()

    assert loop.trained == [[10, 11]]
    assert pool.acknowledged == ["lease-1", "lease-2"]
    loop.stop()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_the_groups_is_refused(start: Start) -> None:
    pool = pool_of(1)
    with pytest.raises(BadRequest, match="written without StepwellCallback"):
        start(pool, resume=json.dumps({"global_step": 3, "stateful_callbacks": {}}))


def test_another_trl_that_does_not_tell_what_it_collates_is_refused(start: Start) -> None:
    callback = StepwellCallback(StepwellRolloutWorker(TrainingPool()))
    loop = start(TrainingPool())
    with pytest.raises(BadRequest, match=r"trl 1\.16\.0 does"):
        loop.begin(callback, object())
    loop.stop()


def test_the_last_checkpoint_is_the_newest_that_is_complete(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    for step, text in {9: json.dumps({"stateful_callbacks": {NAME: {}}}), 10: '{"stateful_call', 11: None}.items():
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if text is not None:
            (folder / "trainer_state.json").write_text(text)

    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
