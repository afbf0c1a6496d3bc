"""Feedback under a lease, over a restart."""

from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import RewardGiven
from tests.unit.pool.shard.journals import Place, kill, open_pool, save


def test_it_counts_when_the_lease_expires_after_the_restart(place: Place) -> None:
    limits = Limits(group_size=2)
    pool, journal, _ = open_pool(place, limits)
    for n in range(2):
        pool.rollout(f"r{n}", "p", float(n), size=2)
    assert pool.lease(1, seconds=100) is not None
    pool.ingest.reward(RewardGiven(trajectory_uid="r1", prompt_uid="p", value=-1.0, source="thumb", notes="\ud800"))
    save(pool, journal)
    kill(journal)
    pool, journal, restored = open_pool(place, limits)
    assert not restored.damaged
    pool.advance(200)
    (group,) = pool.take(1) or [[]]
    assert [(step.reward, step.reward_source) for step in group][1] == (-1, "thumb")


def test_late_rewards_are_numbered_on_after_a_restart(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p", 1.0)
    assert pool.lease(1, seconds=100) is not None
    first = pool.state.count_late_reward("t")
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(place)
    assert pool.state.count_late_reward("t") == first + 1
