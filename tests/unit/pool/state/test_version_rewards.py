"""What the versions of the policy earned."""

import pytest

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.policy import RewardTally, VersionReward
from stepwell.pool.api.scoring import Score
from stepwell.pool.state.series import VersionRewardLog
from stepwell.steps.step import VersionSpan


def read(pool: EasyPool, channel: str = "train") -> list[tuple[int, float]]:
    return [(reward.version, reward.reward) for reward in pool.state.version_rewards.since(channel, 0)]


@pytest.fixture
def pool() -> EasyPool:
    """Two steps of one trajectory, of versions 3 and 4."""
    pool = EasyPool(Limits(require_reward=True))
    spans = (VersionSpan(start=0, end=1, version=2), VersionSpan(start=1, end=2, version=3))
    pool.submit(
        [
            make_step(uid="a", response_ids=[1, 2], version_spans=spans, policy_version=2),
            make_step(uid="b", policy_version=4, started_at=1.0),
        ],
        channel="train",
    )
    return pool


def reward(pool: EasyPool, value: float, step_index: int | None = None) -> None:
    trajectory = pool.state.trajectories["t"]
    if step_index is None:
        pool.state.set_reward(trajectory, value, "test")
    else:
        pool.state.set_step_reward(trajectory, dict(trajectory.in_order())[step_index], value, "test")


def test_a_step_counts_for_its_newest_version_and_an_outcome_for_that_of_the_last_step(pool: EasyPool) -> None:
    reward(pool, 0.5, step_index=0)
    pool.complete("t", "p", 1.0)
    assert read(pool) == [(3, 0.5), (4, 1.0)]


def test_a_reward_that_is_revised_does_not_count_again(pool: EasyPool) -> None:
    for value in (0.5, -0.5):
        reward(pool, value, step_index=0)
        reward(pool, value)
    pool.complete("t", "p", 1.0)
    pool.state.relabel(pool.state.trajectories["t"], 0.0, "curation:ana")
    assert read(pool) == [(3, 0.5), (4, 0.5)]


def test_a_persons_reward_counts_if_it_is_the_first(pool: EasyPool) -> None:
    pool.state.relabel(pool.state.trajectories["t"], 1.0, "curation:ana")
    assert read(pool) == [(4, 1.0)]


def test_of_a_judgement_of_single_steps_the_rest_does_not_count(pool: EasyPool) -> None:
    pool.complete("t", "p")
    pool.take_unscored()
    assert pool.judge("t", "p", Score(1.0, step_rewards=(1.0, None)))
    assert read(pool) == [(3, 1.0)]


def test_a_step_may_bring_its_reward_and_one_without_a_version_counts_for_none() -> None:
    pool = EasyPool(Limits())
    pool.submit([make_step(reward=1.0, policy_version=7)], channel="validation")
    group = pool.state.open_group("q", pool.state.open_channel("train"), 1)
    pool.state.set_reward(pool.state.add_trajectory(group, "empty", {}), 1.0, "test")
    assert read(pool, "validation") == [(7, 1.0)]
    assert read(pool) == []


def test_the_last_rewards_are_kept_and_the_count_goes_on_after_a_restart() -> None:
    log = VersionRewardLog(kept=2)
    for n in range(5):
        log.add("train", VersionReward(n, float(n), "t"))
    assert (log.first("train"), log.end("train")) == (3, 5)
    assert [found.version for found in log.since("train", 0)] == [3, 4]
    assert [found.version for found in log.since("train", 4)] == [4]
    assert log.tallies("train") == {3: RewardTally(1, 3.0), 4: RewardTally(1, 4.0)}
    again = VersionRewardLog(kept=2)
    again.recall(log.counts)
    assert (again.first("train"), again.end("train")) == (5, 5)
    again.add("train", VersionReward(9, 1.0, "t"))
    assert [found.version for found in again.since("train", 5)] == [9]


def test_a_step_whose_reward_a_person_took_back_does_not_count_again() -> None:
    pool = EasyPool(Limits())
    pool.submit([make_step(reward=1.0, policy_version=7)], channel="train")
    pool.state.relabel(pool.state.trajectories["t"], 0.0, "curation:ana")
    reward(pool, 0.5, step_index=0)
    assert read(pool) == [(7, 1.0)]
