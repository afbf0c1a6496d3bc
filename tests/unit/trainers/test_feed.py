"""Where a lease is, from the pool to the acknowledgement; each trainer's tests show when it moves on there."""

from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import BadRequest, FetchTimeout, PoolUnavailable
from stepwell.pool.api.leasing import HasLeases
from stepwell.trainers.feed import Feed, FeedState, read_state, write_state
from stepwell.trainers.settings import FeedSettings
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool


class AwayPool(TrainingPool):
    is_away = False

    def ack(self, leased: HasLeases) -> None:
        if self.is_away:
            raise PoolUnavailable("away")
        super().ack(leased)


def pool_of(*prompts: str) -> AwayPool:
    pool = AwayPool()
    for prompt in prompts:
        turns = [[one_turn(f"{prompt}-{n}", prompt, [1, 2], [3, 4 + n])] for n in range(2)]
        pool.add_group(prompt, [(turn, float(n)) for n, turn in enumerate(turns)])
    return pool


def feed_of(pool: TrainingPool, **settings: Any) -> Feed:
    return Feed(pool, FeedSettings(**settings))


def test_only_what_is_trained_is_acknowledged_and_the_rest_can_return() -> None:
    pool = pool_of("p", "q", "r")
    feed = feed_of(pool)
    first = feed.take(1)
    feed.take(1)
    feed.fetch(1)

    feed.count_as_trained(first.rollouts)
    feed.acknowledge()
    feed.give_back()

    assert (pool.acknowledged, pool.given_back) == (["lease-1"], ["lease-2", "lease-3"])
    assert not feed.has_open_leases
    assert feed.take(2).rows.uids == ("q-0", "q-1", "r-0", "r-1"), "they are as if they had never been taken"


def test_what_is_trained_returns_only_with_its_weights() -> None:
    pool = pool_of("p", "q")
    feed = feed_of(pool)
    feed.take(1)
    feed.count_as_trained()
    feed.take(1)

    feed.give_back()
    assert pool.given_back == ["lease-2"]
    feed.give_back(also_trained=True)
    assert pool.given_back == ["lease-2", "lease-1"]
    feed.acknowledge()
    assert pool.acknowledged == []


@pytest.mark.parametrize("is_trained", [False, True])
def test_what_comes_back_while_the_trainer_has_it_is_not_trained_again(is_trained: bool) -> None:
    pool = pool_of("p", "q")
    feed = feed_of(pool)
    feed.take(1)
    if is_trained:
        feed.count_as_trained()
    pool.advance_to(1000.0)  # its lease expires

    again = feed.take(2)

    assert again.rows.uids == ("q-0", "q-1")
    feed.count_as_trained()
    assert feed.state().trajectories == ["p-0", "p-1", "q-0", "q-1"]
    feed.acknowledge()
    assert pool.held == 0


def test_an_acknowledgement_that_the_pool_did_not_get_is_told_again_and_is_in_the_state() -> None:
    pool = pool_of("p")
    feed = feed_of(pool)
    batch = feed.take(1).batch
    feed.count_as_trained()
    pool.is_away = True

    feed.acknowledge()
    assert (feed.has_open_leases, feed.state().leases) == (True, list(batch.leases))
    feed.give_back(also_trained=True)
    assert pool.given_back == [], "a checkpoint has it"

    pool.is_away = False
    feed.acknowledge()
    assert (pool.acknowledged, feed.state().leases) == (["lease-1"], [])
    assert feed.state().trajectories == ["p-0", "p-1"]


def test_a_state_may_have_what_counts_as_trained_later() -> None:
    feed = feed_of(pool_of("p", "q"))
    first, second = feed.take(1), feed.take(1)
    feed.count_as_trained(first.rollouts)

    state = feed.state(second.rollouts)

    assert state.leases == [*first.batch.leases, *second.batch.leases]
    assert state.trajectories == ["p-0", "p-1", "q-0", "q-1"]
    assert state.statistics == second.rows.statistics.as_numbers() != feed.state().statistics
    assert feed.state().trajectories == ["p-0", "p-1"]


def test_the_next_batch_is_compared_with_those_in_hand() -> None:
    feed = feed_of(pool_of("p", "q"))
    feed.take(1)
    second = feed.take(1)
    whole = feed_of(pool_of("p", "q"))
    whole.take(1)
    whole.count_as_trained()
    assert second.rows.statistics.as_numbers() == whole.take(1).rows.statistics.as_numbers()


def test_rows_that_cannot_be_chosen_return(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no rows")

    pool = pool_of("p")
    monkeypatch.setattr("stepwell.trainers.feed.choose_rows", fail)
    with pytest.raises(ValueError, match="no rows"):
        feed_of(pool).take(1)
    assert pool.given_back == ["lease-1"]


def test_unwanted_groups_are_not_trained_and_not_taken_for_trained() -> None:
    feed = feed_of(pool_of("p", "q"))
    feed.fetch(2)
    chosen = feed.choose({"p-1"})
    assert (chosen.rows.uids, "p-0" in feed, "q-0" in feed) == (("q-0", "q-1"), False, True)


def test_what_is_missing_is_told_by_the_fetch_and_nothing_is_held() -> None:
    feed = feed_of(pool_of())
    with pytest.raises(FetchTimeout):
        feed.take(1)
    assert not feed.leased


def test_a_state_is_read_as_it_was_written_and_another_file_is_refused(tmp_path: Path) -> None:
    state = FeedState(leases=[("s", "l")], trajectories=["p-0"], statistics={"": [1.0, 0.5, 0.0, 0.25]})
    file = tmp_path / "new" / "state.json"
    assert read_state(FeedState, file) is None
    write_state(file, state)
    found = read_state(FeedState, file)
    assert found is not None
    assert (found.leases, found.trajectories, found.statistics) == (
        state.leases,
        state.trajectories,
        state.statistics,
    )
    file.write_text('{"leases": []}')
    with pytest.raises(BadRequest, match="is not the record of a run"):
        read_state(FeedState, file)
