"""The pool's time series: what is counted in which interval, and how long it is kept."""

import pytest

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.stats import Bucket, SeriesChunk, TimeSeries, merge_chunks


def series(pool: EasyPool, seconds: float = 3600) -> TimeSeries:
    return merge_chunks([pool.state.series.chunk(seconds)])


def test_steps_are_counted_in_the_interval_in_which_they_came() -> None:
    pool = EasyPool(Limits())
    pool.advance(101)
    pool.rollout("a", "a")
    pool.advance(104)
    pool.rollout("b", "b", prompt_ids=[1] * 10)
    pool.advance(117)
    pool.rollout("c", "c")
    found = series(pool)
    assert (found.interval, found.ends) == (5.0, [105.0, 110.0, 115.0, 120.0])
    train = found.channels["train"]
    assert train.steps == [2, 0, 0, 1]
    assert train.tokens == [16, 0, 0, 4]
    assert train.groups == [2, 2, 2, 3]
    assert train.ready_groups == [2, 2, 2, 3]
    assert train.oldest_age == [4.0, 9.0, 14.0, 19.0]


def test_what_was_trained_is_counted_when_it_is_acknowledged_with_its_reward_and_its_age_when_handed_out() -> None:
    pool = EasyPool(Limits())
    pool.advance(100)
    for n in range(11):
        pool.rollout(f"t{n}", f"p{n}", n / 10, policy_version=n % 2)
    pool.policy_version = 2
    leased = pool.lease(11)
    assert leased is not None
    pool.policy_version = 9
    pool.advance(107)
    pool.leasing.ack(leased[0])
    train = series(pool).channels["train"]
    assert train.trained_steps == [0, 11]
    assert train.trained_tokens == [0, 44]
    assert train.rewards == [0, 11]
    assert train.reward_mean == [None, pytest.approx(0.5)]
    assert (train.reward_low, train.reward_high) == ([None, 0.1], [None, 0.9])
    assert train.staleness == [{}, {2: 6, 1: 5}]


def test_waste_is_counted_by_cause() -> None:
    pool = EasyPool(Limits())
    pool.advance(0.5)
    pool.rollout("aborted", "a")
    pool.abort("aborted", "a")
    pool.rollout("marked", "b", untrainable="greedy: temperature is 0")
    pool.take(1)
    pool.advance(6)
    assert series(pool).channels["train"].dropped_tokens == {"aborted": [4, 0], "left out: greedy": [4, 0]}


def test_a_longer_time_comes_in_longer_steps() -> None:
    pool = EasyPool(Limits())
    for minute in range(90):
        pool.advance(60.0 * minute + 7)
        pool.rollout(f"t{minute}", f"p{minute}", 1.0 if minute % 2 else 0.0)
        pool.take(1)
    hour, day = series(pool, 3600), series(pool, 86_400)
    assert (hour.interval, len(hour.ends)) == (5.0, 720)
    assert (day.interval, day.ends) == (60.0, [60.0 * n for n in range(1, 91)])
    assert day.channels["train"].trained_steps == [1] * 90
    assert day.channels["train"].reward_mean[-4:] == [0.0, 1.0, 0.0, 1.0]
    assert sum(hour.channels["train"].steps) == 60
    assert len(series(pool, 900).ends) == 180


def test_a_day_on_which_no_one_called_is_empty_and_costs_little() -> None:
    pool = EasyPool(Limits())
    pool.advance(10)
    pool.rollout("t", "p")
    pool.advance(30 * 86_400)
    day = series(pool, 86_400)
    assert len(day.ends) == 1440
    assert sum(day.channels["train"].steps) == 0
    assert set(day.channels["train"].groups) == {1}


def test_a_pool_that_comes_back_does_not_count_again_what_it_had() -> None:
    pool = EasyPool(Limits())
    pool.rollout("t", "p")
    pool.advance(100)
    pool.register(Registration("u", "q"))
    pool.submit([make_step("u", "q")])
    assert series(pool).channels["train"].steps == [1]


def test_nothing_has_happened_before_the_first_message() -> None:
    assert series(EasyPool(Limits())) == TimeSeries(interval=5.0, ends=[], channels={})


def strip(ends: list[int], moment: Bucket) -> SeriesChunk:
    return SeriesChunk(5.0, [(float(end), {"train": moment}) for end in ends])


def test_shards_are_added_up_and_the_series_ends_where_all_of_them_tell() -> None:
    busy = strip([5, 10, 15], Bucket(steps=3, rewards=3, reward_mean=1.0, groups=2, oldest_age=9.0))
    restarted = strip([10], Bucket(steps=1, rewards=1, reward_mean=0.0, groups=1, oldest_age=2.0))
    found = merge_chunks([busy, restarted])
    assert found.ends == [5.0, 10.0]
    train = found.channels["train"]
    assert (train.steps, train.groups, train.oldest_age) == ([3, 4], [2, 3], [9.0, 9.0])
    assert train.reward_mean == [1.0, 0.75]
