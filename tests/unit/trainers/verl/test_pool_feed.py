"""What verl is given of a pool, and what the pool is told of it; verl itself runs in tests/e2e/test_verl_trainer.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.errors import FetchTimeout, NothingLearned
from stepwell.steps.step import VersionSpan
from stepwell.trainers.feed import write_state
from stepwell.trainers.verl.mode_settings import PoolModeSettings
from stepwell.trainers.verl.pool_feed import FILE, PoolFeed, VerlState
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool


def feed_of(pool: TrainingPool, **settings: Any) -> PoolFeed:
    return PoolFeed(pool, PoolModeSettings(weights="weights", **settings))


def add_group(pool: TrainingPool, prompt: str, rewards: tuple[float, ...] = (1.0, 0.0), version: int = 0) -> None:
    turns = [
        [one_turn(f"{prompt}-{i}", prompt, [1, 2], [3, 4 + i], policy_version=version)] for i in range(len(rewards))
    ]
    pool.add_group(prompt, list(zip(turns, rewards, strict=True)))


def test_a_row_begins_its_response_at_the_first_trained_token() -> None:
    pool = TrainingPool()
    add_group(pool, "p")

    good, bad = feed_of(pool).take_rows(1).rows

    assert (good.ids.tolist(), good.prompt) == ([1, 2, 3, 4], 2)
    assert (good.mask.tolist(), good.logprobs.tolist()) == ([1, 1], [-2, -2])
    assert (good.reward, bad.reward) == (1.0, 0.0)
    assert good.advantages == pytest.approx([0.5**0.5] * 2, abs=1e-3)
    assert good.key == f"{good.group}_0_0"
    assert bad.key == f"{good.group}_1_0"
    assert "_" not in good.group, "verl splits keys there"


def test_advantages_do_not_depend_on_how_a_rollout_is_cut_into_rows() -> None:
    """One rollout has a fork, so two rows; its twin has the same calls in one row."""
    pool = TrainingPool()
    forked = [one_turn("a", "p", [1, 2], [3]), one_turn("a", "p", [5, 6, 8], [7])]
    whole = [one_turn("c", "q", [1, 2], [3]), one_turn("c", "q", [1, 2, 3, 8], [7])]
    for prompt, uids, turns in (("p", "ab", forked), ("q", "cd", whole)):
        others = [([one_turn(f"{uids[1]}{i}", prompt, [1], [2])], reward) for i, reward in enumerate((0.0, 0.5))]
        pool.add_group(prompt, [(turns, 1.0), *others])

    rows = feed_of(pool).take_rows(2).rows

    assert len([row for row in rows if row.reward == 1.0]) == 3
    of_reward = {
        reward: {round(float(row.advantages[row.mask == 1][0]), 6) for row in rows if row.reward == reward}
        for reward in (0.0, 0.5, 1.0)
    }
    assert [len(found) for found in of_reward.values()] == [1, 1, 1]
    assert sum(value for found in of_reward.values() for value in found) == pytest.approx(0.0, abs=1e-4)


def test_tokens_between_calls_are_not_trained_and_turns_are_counted() -> None:
    pool = TrainingPool()
    long = [one_turn("a", "p", [1, 2], [3]), one_turn("a", "p", [1, 2, 3, 8, 9], [7])]
    pool.add_group("p", [(long, 1.0), ([one_turn("b", "p", [1], [2])], 0.0)])

    row = feed_of(pool).take_rows(1).rows[0]

    assert (row.ids.tolist(), row.prompt, row.turns) == ([1, 2, 3, 8, 9, 7], 2, 2)
    assert row.mask.tolist() == [1, 0, 0, 1]
    assert row.logprobs.tolist() == [-2, 0, 0, -2]
    assert row.advantages[1:3].tolist() == [0, 0]


def test_a_batch_is_acknowledged_when_the_trainer_says_so() -> None:
    pool = TrainingPool()
    add_group(pool, "p")
    feed = feed_of(pool)

    feed.take_rows(1)
    feed.acknowledge()
    assert pool.acknowledged == [], "it is not in the weights yet"
    feed.count_as_trained()
    assert pool.acknowledged == []
    feed.acknowledge()
    assert pool.acknowledged == ["lease-1"]
    assert pool.held == 0


def test_groups_that_teach_nothing_are_passed_over_and_do_not_come_back() -> None:
    pool = TrainingPool()
    add_group(pool, "p", rewards=(1.0, 1.0))
    add_group(pool, "q")
    feed = feed_of(pool)

    taken = feed.take_rows(1)

    assert len(taken.rows) == 2
    feed.count_as_trained()
    feed.acknowledge()
    assert pool.acknowledged == ["lease-1", "lease-2"]


def test_too_many_batches_that_teach_nothing_end_the_training_and_are_given_back() -> None:
    pool = TrainingPool()
    for prompt in "pq":
        add_group(pool, prompt, rewards=(1.0, 1.0))
    feed = feed_of(pool, max_unlearnable=2)

    with pytest.raises(NothingLearned, match="same return"):
        feed.take_rows(1)
    feed.give_back(also_trained=True)
    assert pool.held == 4


def test_what_is_lost_with_the_weights_comes_back() -> None:
    pool = TrainingPool()
    for prompt in "pqr":
        add_group(pool, prompt)
    feed = feed_of(pool)

    feed.take_rows(1)
    feed.count_as_trained()
    feed.acknowledge()
    feed.take_rows(1)
    feed.count_as_trained()
    feed.take_rows(1)
    feed.give_back(also_trained=True)

    assert pool.acknowledged == ["lease-1"]
    assert sorted(pool.given_back) == ["lease-2", "lease-3"]
    assert {row.reward for row in feed_of(pool).take_rows(2).rows} == {0.0, 1.0}


def test_a_group_that_is_too_old_is_not_trained_as_a_whole_and_does_not_come_back() -> None:
    pool = TrainingPool()
    pool.set_policy_version(9)
    spans = (VersionSpan(4, 0, 1), VersionSpan(9, 1, 2))
    mixed = one_turn("a", "p", [1, 2], [3, 4], policy_version=9, version_spans=spans)
    pool.add_group("p", [([mixed], 1.0), ([one_turn("b", "p", [1, 2], [3, 4], policy_version=9)], 0.0)])
    add_group(pool, "q", version=8)
    feed = feed_of(pool)
    feed.version = 9

    taken = feed.take_rows(1, max_age=4)

    assert {(row.oldest, row.newest) for row in taken.rows} == {(8, 8)}
    assert (taken.metrics["groups_evicted"], taken.metrics["staleness"]) == (1, 1)
    feed.count_as_trained()
    feed.acknowledge()
    assert pool.acknowledged == ["lease-1", "lease-2"]


def test_rows_that_are_too_long_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    pool = TrainingPool()
    pool.add_group("p", [([one_turn("a", "p", [1] * 9, [2])], 1.0), ([one_turn("b", "p", [1], [2])], 0.0)])

    taken = feed_of(pool, max_row_tokens=4).take_rows(1)

    assert [row.reward for row in taken.rows] == [0.0]
    assert taken.metrics["rows_too_long"] == 1
    assert "more than 4 tokens" in caplog.text


def test_what_is_missing_is_said() -> None:
    with pytest.raises(FetchTimeout):
        feed_of(TrainingPool()).take_rows(1)


def test_metrics_count_rollouts_and_not_rows() -> None:
    pool = TrainingPool()
    forked = [one_turn("a", "p", [1, 2], [3]), one_turn("a", "p", [5, 6, 8], [7])]
    pool.add_group("p", [(forked, 1.0), ([one_turn("b", "p", [1], [2])], 0.0)])
    add_group(pool, "q", rewards=(1.0, 1.0))

    metrics = feed_of(pool).take_rows(2).metrics

    assert metrics["reward"] == pytest.approx(0.75)
    assert (metrics["rollouts"], metrics["rollouts_trained"], metrics["rows"]) == (4, 2, 3)
    assert metrics["groups_equal"] == 1


def test_a_killed_run_goes_on_without_loss_or_repetition(tmp_path: Path) -> None:
    """Killed after its checkpoint was written, before the acknowledgement; and with one batch trained after it."""
    pool = TrainingPool()
    for prompt in "pqr":
        add_group(pool, prompt)
    killed = feed_of(pool)
    killed.begin(None)
    killed.take_rows(1)
    killed.count_as_trained()
    killed.save(tmp_path)
    killed.take_rows(1)
    killed.count_as_trained()
    pool.advance_to(1000.0)  # its leases expire

    resumed = feed_of(pool)
    resumed.begin(tmp_path)
    for _ in "qr":
        resumed.take_rows(1)
        resumed.count_as_trained()

    assert resumed.state().trajectories == ["p-0", "p-1", "q-0", "q-1", "r-0", "r-1"]
    resumed.acknowledge()
    with pytest.raises(FetchTimeout):
        resumed.take_rows(1)
    assert pool.held == 0


@pytest.mark.parametrize(("saved", "newest", "expected"), [(None, 0, 0), (None, 3, 4), (5, 4, 5), (5, 5, 5), (5, 7, 8)])
def test_no_version_names_two_sets_of_weights(saved: int | None, newest: int, expected: int, tmp_path: Path) -> None:
    pool = TrainingPool()
    if newest:
        pool.set_policy_version(newest)
    if saved is not None:
        write_state(tmp_path / FILE, VerlState(version=saved, leases=[], trajectories=[]))
    feed = feed_of(pool)

    feed.begin(tmp_path)

    assert feed.version == expected
    feed.save(tmp_path)
    assert json.loads((tmp_path / FILE).read_bytes())["version"] == expected + 1


def test_the_statistics_of_earlier_batches_are_in_a_checkpoint(tmp_path: Path) -> None:
    """A group of one is compared with them."""
    pool = TrainingPool()
    add_group(pool, "p")
    feed = feed_of(pool)
    feed.take_rows(1)
    feed.count_as_trained()
    feed.save(tmp_path)
    add_group(pool, "q", rewards=(1.0,))

    resumed = feed_of(pool)
    resumed.begin(tmp_path)
    (row,) = resumed.take_rows(1).rows

    assert np.all(row.advantages > 0.5)


def test_a_folder_without_our_file_is_a_checkpoint_of_another_mode(tmp_path: Path) -> None:
    feed = feed_of(TrainingPool())
    feed.begin(tmp_path)
    assert (feed.version, feed.state().leases) == (0, [])
