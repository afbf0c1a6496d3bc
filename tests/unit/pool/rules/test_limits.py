"""Deadlines, staleness, capacity, pacing, late rewards and the ledger of what was lost."""

import gc
import tracemalloc
from typing import Any

import pytest

from rig.builders import EasyPool, make_step
from stepwell.errors import Conflict, PoolFull
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits, OnDeadline, Overflow
from stepwell.pool.api.producing import Refill, Registration, RewardGiven, SubmitVerdict, merge_pacing
from stepwell.pool.api.stats import merge_stats
from stepwell.steps.step import VersionSpan


def pool(**limits: Any) -> EasyPool:
    return EasyPool(Limits(**limits))


def half_done(**limits: Any) -> EasyPool:
    """A group of four: two complete, one begun, one missing; its deadline is at 10."""
    p = pool(group_deadline=10.0, **limits)
    p.rollout("a", "p", size=4)
    p.rollout("b", "p", size=4)
    p.register(Registration("slow", "p", group_size=4))
    p.submit([make_step("slow", "p")])
    return p


def dropped(p: EasyPool) -> dict[str, int]:
    return {cause: tally.steps for cause, tally in p.stats().channels["train"].dropped.items()}


def test_one_lost_rollout_does_not_stop_training_for_good() -> None:
    p = half_done(unfinished_reward=None)
    p.advance(9.9)
    assert p.take(1) is None
    p.advance(10.0)
    taken = p.take(1)
    assert taken is not None
    assert [step.trajectory_uid for step in taken[0]] == ["a", "b"]
    assert dropped(p) == {"deadline": 1}
    assert p.submit([make_step("slow", "p", uid="late")]) == [SubmitVerdict.LATE]


def test_a_group_with_too_few_at_its_deadline_is_dropped() -> None:
    p = half_done(min_group_size=4)
    p.advance(10.0)
    assert p.take(1) is None
    assert dropped(p) == {"deadline": 3}


def test_a_group_can_be_dropped_whole_at_its_deadline() -> None:
    p = half_done(on_deadline=OnDeadline.DROP)
    p.advance(10.0)
    assert dropped(p) == {"deadline": 3}


def test_a_refilled_group_asks_producers_for_what_is_missing_until_it_is_there() -> None:
    p = half_done(on_deadline=OnDeadline.REFILL, unfinished_reward=None)
    assert p.pacing("train").refills == ()
    p.advance(10.0)
    assert p.pacing("train").refills == (Refill("p", 2),)
    p.rollout("c", "p", size=4)
    assert p.pacing("train").refills == (Refill("p", 1),)
    p.rollout("d", "p", size=4)
    assert p.pacing("train").refills == ()
    taken = p.take(1)
    assert taken is not None
    assert [step.trajectory_uid for step in taken[0]] == ["a", "b", "c", "d"]


def test_a_complete_group_has_no_deadline() -> None:
    p = pool(group_deadline=10.0)
    p.rollout("a", "p")
    p.advance(1000.0)
    assert p.take(1) is not None


def test_staleness_counts_from_the_oldest_token_when_it_is_shipped() -> None:
    p = pool(max_staleness=2)
    spans = (VersionSpan(1, 0, 1), VersionSpan(3, 1, 2))
    p.rollout("mixed", "p", policy_version=1, version_spans=spans)
    p.policy_version = 3
    assert p.lease(1) is not None, "two versions behind is allowed"
    p = pool(max_staleness=2)
    p.rollout("mixed", "p", policy_version=3, version_spans=spans)
    p.policy_version = 4
    assert p.take(1) is None, "the oldest token is three versions behind, though it waited in the queue meanwhile"
    assert dropped(p) == {"stale": 1}


def test_stale_data_can_be_kept() -> None:
    p = pool(max_staleness=0, on_stale="keep")
    p.rollout("old", "p")
    p.policy_version = 9
    assert p.take(1) is not None


def test_stale_tokens_can_be_masked_and_the_rest_trained() -> None:
    p = pool(max_staleness=1, on_stale="mask")
    p.rollout("mixed", "p", response_ids=[5, 6, 7], version_spans=(VersionSpan(1, 0, 2), VersionSpan(4, 2, 3)))
    p.rollout("old", "q")
    p.policy_version = 5
    taken = p.take(1)
    assert taken is not None
    assert taken[0][0].response_mask is not None
    assert taken[0][0].response_mask.tolist() == [False, False, True]
    assert p.take(1) is None, "nothing of the old one is left to train"
    assert dropped(p) == {"stale": 1}


@pytest.mark.parametrize("unit", [Unit.TRAJECTORIES, Unit.STEPS])
def test_stale_data_is_dropped_in_every_unit(unit: Unit) -> None:
    p = pool(max_staleness=1)
    p.rollout("old", "p", policy_version=0)
    p.rollout("new", "q", policy_version=2)
    p.policy_version = 2
    taken = p.take(1, unit=unit)
    assert taken is not None
    assert taken[0][0].trajectory_uid == "new"
    assert dropped(p) == {"stale": 1}


def test_bytes_are_bounded_by_dropping_the_oldest() -> None:
    p = pool(max_bytes=100_000)
    for n in range(20):
        p.rollout(f"t{n}", f"p{n}", prompt_ids=range(5_000))
    assert p.stats().channels["train"].nbytes <= 100_000
    taken = p.take(1)
    assert taken is not None
    assert taken[0][0].trajectory_uid == "t16"


def test_a_pool_that_refuses_lets_running_trajectories_finish_before_it_is_full() -> None:
    p = pool(max_bytes=100_000, overflow=Overflow.REFUSE)
    p.register(Registration("running", "r"))
    for n in range(4):
        p.rollout(f"t{n}", f"p{n}", prompt_ids=range(4_700))
    p.rollout("t4", "p4", prompt_ids=range(1_000))
    with pytest.raises(PoolFull, match="channel 'train' is full"):
        p.register(Registration("new", "n"))
    assert p.submit([make_step("new", "n")], channel="train") == [SubmitVerdict.FULL]
    assert p.submit([make_step("running", "r", uid="small")]) == [SubmitVerdict.ACCEPTED]
    assert p.submit([make_step("running", "r", uid="more", prompt_ids=range(20, 2_020))]) == [SubmitVerdict.FULL]
    assert dropped(p) == {}


def test_groups_are_bounded_by_refusing_too() -> None:
    p = pool(max_queue_size=1, overflow=Overflow.REFUSE)
    p.rollout("a", "p", size=2)
    with pytest.raises(PoolFull):
        p.register(Registration("b", "q"))
    p.rollout("c", "p", size=2)
    assert p.lease(1) is not None
    with pytest.raises(PoolFull):
        p.register(Registration("d", "r"))  # what is under lease may come back


def test_pacing_lets_start_what_cannot_become_too_stale() -> None:
    p = pool(max_staleness=1, batch_size=4)
    assert p.pacing("train").may_start == 8
    p.rollout("done", "p")
    p.register(Registration("running", "q"))
    now = p.pacing("train")
    assert (now.in_flight, now.queued, now.may_start) == (1, 1, 6)


def test_pacing_learns_the_batch_from_the_last_fetch() -> None:
    p = pool(max_staleness=0)
    assert p.pacing("train").may_start is None
    for uid in ("a", "b"):
        p.rollout(uid, "p", size=2)
    p.take(1)
    assert p.pacing("train").may_start == 2


def test_pacing_of_shards_adds_up() -> None:
    first, second = pool(max_staleness=1), pool(max_staleness=1)
    for p in (first, second):
        p.rollout("a", "p")
        p.take(1)
        p.register(Registration("b", "q"))
    merged = merge_pacing([first.pacing("train"), second.pacing("train")], None)
    assert (merged.batch, merged.in_flight, merged.may_start) == (2, 2, 2)
    assert merge_pacing([first.pacing("train")], 10).may_start == 19


def test_a_reward_may_come_late_and_be_revised_until_it_is_shipped() -> None:
    p = pool(require_reward=True)
    p.rollout("t", "p", reward=None)
    assert p.take(1) is None
    assert "1 without a reward" in p.waiting_for(wanted())
    for value in (0.25, 0.75):
        assert p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=value, source="judge"))
    taken = p.take(1)
    assert taken is not None
    (step,) = taken[0]
    assert (step.reward, step.reward_source, step.reward_revision) == (0.75, "judge", 2)
    assert not p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.0)), "it was already shipped"


def test_a_consumer_whose_own_leases_fill_the_channel_is_told_so() -> None:
    p = pool(max_queue_size=2, overflow=Overflow.REFUSE)
    p.rollout("a", "p")
    leased = p.lease(1)
    assert leased is not None
    assert p.waiting_for(wanted()).endswith("0 ready of 0 groups held, 1 more leased and not acknowledged")
    p.rollout("b", "q")
    p.lease(1)
    with pytest.raises(PoolFull):
        p.register(Registration("c", "r"))
    assert p.waiting_for(wanted()).endswith(
        "0 ready of 0 groups held, 2 more leased and not acknowledged: with these the channel is full, and new "
        "trajectories are refused. A trainer acknowledges when it saves a checkpoint: let it save more often, or give "
        "the pool more room (--max-queue-size, --max-bytes)"
    )
    p.leasing.ack(leased[0])
    assert p.waiting_for(wanted()).endswith("0 ready of 0 groups held, 1 more leased and not acknowledged")


def wanted() -> Any:
    from stepwell.pool.api.leasing import BatchRequest

    return BatchRequest(count=1, channel="train")


def test_a_single_step_can_be_rewarded() -> None:
    p = pool(require_reward=True)
    p.register(Registration("t", "p"))
    p.submit([make_step(uid="a", started_at=1), make_step(uid="b", started_at=2)])
    p.complete("t", "p")
    assert p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5, source="process", step_index=0))
    with pytest.raises(Conflict, match="has no step 7"):
        p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5, step_index=7))
    taken = p.take(1)
    assert taken is not None
    assert [step.reward for step in taken[0]] == [0.5, None]


def test_statistics_of_shards_add_up() -> None:
    first, second = pool(), pool(max_queue_size=1)
    first.rollout("a", "p")
    second.rollout("b", "q")
    second.rollout("c", "r")
    second.submit([make_step("nobody", "p")])
    merged = merge_stats([first.stats(), second.stats()])
    train = merged.channels["train"]
    assert (train.ready_groups, train.accepted.steps, train.dropped["evicted"].steps) == (2, 3, 1)
    assert (merged.submitted, merged.refused) == (4, {"unknown": 1})


def test_eviction_frees_the_memory_of_what_it_drops() -> None:
    p = pool(max_queue_size=10)
    gc.disable()  # it must not take the garbage collector
    tracemalloc.start()
    try:
        for n in range(500):
            p.rollout(f"t{n}", f"p{n}", prompt_ids=range(2000))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert p.stats().channels["train"].held.steps == 10
    assert held < 1_000_000, "500 steps of 8 kB went in, 10 are held, the rest must be free"


def test_what_was_acknowledged_is_free_at_once() -> None:
    p = pool()
    gc.disable()
    tracemalloc.start()
    try:
        for n in range(500):
            p.rollout(f"t{n}", f"p{n}", prompt_ids=range(2000))
            p.take(1)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held < 1_000_000
