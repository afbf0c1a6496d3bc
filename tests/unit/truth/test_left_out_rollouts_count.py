"""T6, T1: what a batch does not have still counts in the baseline of its group.

A rollout of which no step was shipped (quarantined, untrainable, cut off before its first answer) was missing from its
group, so the advantages of the others depended on a consumer's filter.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.builders import EasyPool, make_step
from stepwell.pool.api.leasing import merge_leased_groups
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import EndResult, Registration
from stepwell.pool.client.batch import Batch, batch_from_arrow, batch_of
from stepwell.steps.advantages import AdvantageKind, group_advantages
from stepwell.steps.step import Step
from stepwell.trainers.comparison import response_advantages
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings
from tests.unit.pool.shard.journals import kill, open_pool, save

KINDS: tuple[AdvantageKind, ...] = ("rollout", "step", "reward_to_go")
SIDE_CALL = "side_call: a title"
UNSOUND = "bad_logprob: a log-probability is not finite"


def leased(pool: EasyPool, count: int = 1, **how: Any) -> Batch:
    taken = pool.lease(count, **how)
    assert taken is not None
    return batch_of(taken[1])


def group_with(*, size: int = 3, **of_third: Any) -> EasyPool:
    """Rollouts with rewards 1 and 0, and a third one with 1, whose step has these fields."""
    pool = EasyPool(Limits())
    pool.rollout("a", "p", 1.0, size=size, temperature=1.0)
    pool.rollout("b", "p", 0.0, size=size, temperature=1.0, response_ids=[5, 6])
    pool.register(Registration("c", "p", group_size=size))
    pool.submit([make_step("c", "p", uid="c-0", **of_third)])
    assert pool.complete("c", "p", 1.0) is EndResult.COMPLETED
    return pool


def advantages(batch: Batch, kind: AdvantageKind = "rollout") -> list[float]:
    """Of each step that is there: the advantage of its first token."""
    firsts = batch.response_offsets_S[:-1]
    return [float(value) for value in response_advantages(batch, RowSettings(advantage=kind))[firsts]]


@pytest.mark.parametrize(
    ("left_out", "limits"),
    [({"untrainable": SIDE_CALL}, {}), ({"quarantine": UNSOUND}, {}), ({"model": "other"}, {"trained_models": ("m",)})],
    ids=["untrainable", "quarantined", "another model"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_whose_steps_are_all_left_out_counts_in_the_baseline(
    left_out: dict[str, Any], limits: dict[str, Any], kind: AdvantageKind
) -> None:
    pool = group_with(**left_out)
    pool.state.limits = replace(pool.state.limits, **limits)
    batch = leased(pool)
    assert batch.returns_T.tolist() == [1.0, 0.0], "the rollouts of which there are steps"
    assert batch.whole_groups().returns_T.tolist() == [1.0, 0.0, 1.0]
    expected = group_advantages(np.array([1.0, 0.0, 1.0]), np.zeros(3, np.int64))[:2]
    assert advantages(batch, kind) == pytest.approx(expected.tolist())


def test_a_rollout_of_the_policy_that_recorded_nothing_counts_in_the_baseline() -> None:
    pool = EasyPool(Limits())
    pool.rollout("a", "p", 1.0, size=2)
    pool.register(Registration("b", "p", group_size=2))
    assert pool.ingest.complete("b", "p", 0.0, "too_long") is EndResult.COMPLETED
    batch = leased(pool)
    assert batch.whole_groups().returns_T.tolist() == [1.0, 0.0]
    assert advantages(batch) == [pytest.approx(0.5**0.5, abs=1e-3)]
    assert choose_rows(batch, (), RowSettings(assumed_temperature=1.0)).tokens == 2


def test_a_rollout_that_recorded_nothing_and_did_not_fail_is_empty() -> None:
    """Its agent made no call: something is wrong with it, not with the policy."""
    pool = EasyPool(Limits())
    pool.register(Registration("a", "p"))
    assert pool.complete("a", "p", 1.0) is EndResult.EMPTY


def test_a_group_of_which_nothing_can_be_trained_leaves_the_queue_and_says_why() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("a", "p"))
    pool.ingest.complete("a", "p", 0.0, "too_long")
    assert pool.lease(1) is None
    snapshot = pool.state.last_snapshot("a")
    assert snapshot is not None
    assert snapshot.cause == "no_sound_step"
    assert pool.stats().channels["train"].groups == 0


def test_equal_returns_of_a_rollout_that_is_there_and_one_that_is_not_teach_nothing() -> None:
    pool = EasyPool(Limits())
    pool.rollout("a", "p", 1.0, size=2, temperature=1.0)
    pool.register(Registration("b", "p", group_size=2))
    pool.ingest.complete("b", "p", 1.0, "gave_up")
    rows = choose_rows(leased(pool), ())
    assert (rows.tokens, rows.left_out.groups_equal, rows.left_out.groups_single) == (0, 1, 0)


def test_a_restart_keeps_a_completed_rollout_without_steps(tmp_path: Path) -> None:
    pool, journal, _ = open_pool(tmp_path / "journal.db")
    pool.ingest.register(Registration("a", "p"))
    pool.ingest.complete("a", "p", 0.25, "too_long")
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(tmp_path / "journal.db")
    found = pool.state.trajectories["a"]
    assert (found.completed, found.reward, found.metadata) == (True, 0.25, {"ended_by": "too_long"})
    journal.close()


def test_a_table_keeps_what_is_left_out() -> None:
    pytest.importorskip("pyarrow")
    batch = leased(group_with(untrainable=SIDE_CALL, reward=0.25))
    again = batch_from_arrow(batch.to_arrow())
    for kind in KINDS:
        assert advantages(again, kind) == advantages(batch, kind)


def test_groups_of_several_shards_keep_what_is_left_out() -> None:
    parts = []
    for opened_at in (2.0, 1.0):
        taken = group_with(untrainable=SIDE_CALL).lease(1)
        assert taken is not None
        parts.append(replace(taken[1], opened_at=[opened_at]))
    parts[0] = replace(parts[0], left_out=replace(parts[0].left_out, returns_E=np.array([4.0])))
    batch = batch_of(merge_leased_groups(parts))
    whole = batch.whole_groups()
    assert whole.returns_T[whole.group_of_T == 0].tolist() == [1.0, 0.0, 1.0], "the older group comes first"
    assert whole.returns_T[whole.group_of_T == 1].tolist() == [1.0, 0.0, 4.0]


def three_steps(uid: str, rewards: tuple[float | None, ...], marks: tuple[str | None, ...]) -> list[Step]:
    return [
        make_step(uid, "p", uid=f"{uid}-{n}", started_at=float(n), reward=reward, untrainable=mark)
        for n, (reward, mark) in enumerate(zip(rewards, marks, strict=True))
    ]


def test_the_reward_of_a_left_out_step_counts_for_the_steps_before_it_and_not_for_those_after_it() -> None:
    """The example of docs/training.md: 0.3, 0.7, 0.9 and the outcome 0.8, beside a rollout without rewards."""
    pool = EasyPool(Limits())
    rewards = {"a": (0.3, 0.7, 0.9), "b": (0.0, 0.0, 0.0)}
    for uid, outcome in (("a", 0.8), ("b", 0.0)):
        pool.register(Registration(uid, "p", group_size=2))
        pool.submit(three_steps(uid, rewards[uid], (None, SIDE_CALL, None)))
        pool.complete(uid, "p", outcome)
    first, third, *_ = advantages(leased(pool), "reward_to_go")
    deviation = 2.7 / 2**0.5
    assert first == pytest.approx((0.3 + 0.7 + 0.9 + 0.8) / 2 / deviation, abs=1e-3)
    assert third == pytest.approx((0.9 + 0.8) / 2 / deviation, abs=1e-3)


rewards_of = st.none() | st.sampled_from([-1.0, 0.0, 0.25, 0.3, 1.0])
rollouts_of = st.tuples(st.lists(st.tuples(rewards_of, st.booleans()), min_size=1, max_size=4), rewards_of)


@given(st.lists(rollouts_of, min_size=1, max_size=4))
def test_advantages_do_not_depend_on_what_is_left_out(rollouts: list[Any]) -> None:
    pool = EasyPool(Limits())
    for number, (steps, outcome) in enumerate(rollouts):
        uid = f"t{number}"
        pool.register(Registration(uid, "p", group_size=len(rollouts)))
        rewards, marks = zip(*((reward, SIDE_CALL if is_marked else None) for reward, is_marked in steps), strict=True)
        pool.submit(three_steps(uid, rewards, marks))
        pool.complete(uid, "p", outcome)
    everything = pool.lease(1, untrainable=True)
    assert everything is not None
    whole = batch_of(everything[1])
    pool.leasing.nack(everything[0])
    taken = pool.lease(1)
    if taken is None:
        return
    filtered = batch_of(taken[1])
    for kind in KINDS:
        of_steps = dict(zip(whole.columns.uids, advantages(whole, kind), strict=True))
        expected = [of_steps[uid] for uid in filtered.columns.uids]
        np.testing.assert_allclose(advantages(filtered, kind), expected, atol=1e-9)
