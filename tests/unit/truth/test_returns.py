"""T1: the return of a trajectory is its outcome reward and the rewards of all its steps, whoever gave them, in whatever
order, and whichever steps a trainer takes."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.exports.export_files import LateRewards
from stepwell.exports.pool_transfer import message

from rig.builders import EasyPool, make_step
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.scoring import Score
from stepwell.pool.client.batch import batch_from_arrow, batch_of, make_batch
from stepwell.pool.shard.archive_files import LateReward, late_rewards_table
from stepwell.pool.slices.curation import Curation, CurationAction
from stepwell.steps.columns import pack, unpack
from stepwell.steps.groups import StepGroup
from stepwell.steps.returns import put_together, return_of, take_apart
from stepwell.steps.step import Exactness

SIDE_CALL = "side_call: a title"
PROCESS = (0.3, 0.7, 0.9)
OUTCOME = 0.8


def returns(pool: EasyPool, **how: Any) -> list[float]:
    leased = pool.lease(1, **how)
    assert leased is not None
    return [float(value) for value in batch_of(leased[1]).returns_T]


def process_rewarded(pool: EasyPool, **limits: Any) -> EasyPool:
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=str(n), reward=reward, started_at=n) for n, reward in enumerate(PROCESS)])
    return pool


def test_the_outcome_reward_counts_beside_the_reward_of_the_last_step() -> None:
    pool = process_rewarded(EasyPool(Limits()))
    pool.complete("t", "p", OUTCOME)
    leased = pool.lease(1)
    assert leased is not None
    batch = batch_of(leased[1])
    assert batch.returns_T.tolist() == [pytest.approx(2.7)]
    assert [step.reward for step in batch.steps()] == list(PROCESS), "a step keeps its own reward"
    assert {step.outcome_reward for step in batch.steps()} == {OUTCOME}


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_an_outcome_of_0_and_one_of_1_give_different_returns(outcome: float) -> None:
    pool = process_rewarded(EasyPool(Limits()))
    pool.complete("t", "p", outcome)
    assert returns(pool) == [pytest.approx(1.9 + outcome)]


def test_a_score_with_step_rewards_gives_its_value_as_the_return() -> None:
    pool = EasyPool(Limits(require_reward=True))
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=str(n), started_at=n) for n in range(3)])
    pool.complete("t", "p")
    pool.take_unscored()
    assert pool.judge("t", "p", Score(1.0, step_rewards=(0.1, 0.2, 0.3)))
    assert returns(pool) == [pytest.approx(1.0)]


def test_the_reward_of_a_step_that_is_left_out_counts() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="0", reward=0.5), make_step(uid="1", reward=0.25, untrainable=SIDE_CALL, started_at=1)])
    pool.complete("t", "p", 1.0)
    assert returns(pool) == [1.75]


def test_a_persons_reward_is_the_whole_return() -> None:
    pool = process_rewarded(EasyPool(Limits()))
    pool.complete("t", "p", OUTCOME)
    decision = Curation(action=CurationAction.RELABEL, trajectory_uid="t", prompt_uid="p", by="ann", reward=0.25)
    pool.curator.curate(decision)
    assert returns(pool) == [0.25]


def test_an_open_trajectory_is_read_with_its_outcome_reward() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="0"), make_step(uid="1", started_at=1)])
    assert pool.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5))
    columns, _ = pool.view.read([("t", "p")])
    steps = unpack(columns, copy=False)
    assert return_of(steps) == 0.5
    assert [(step.reward, step.is_last) for step in steps] == [(None, False), (0.5, False)]


def test_a_step_that_is_taken_from_an_open_trajectory_does_not_show_its_outcome() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="0")])
    pool.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5))
    assert [step.reward for step in (pool.take(1, unit=Unit.STEPS) or [[]])[0]] == [None]
    pool.submit([make_step(uid="1", started_at=1)])
    pool.complete("t", "p")
    assert [step.reward for step in (pool.take(1, unit=Unit.STEPS) or [[]])[0]] == [0.5]


def test_a_batch_of_an_older_version_has_the_sums_of_its_rewards() -> None:
    older = pack([make_step("a", reward=0.5, step_index=0), make_step("a", reward=0.25, step_index=1), make_step("b")])
    found = make_batch(older, [3]).returns_T
    assert found[0] == 0.75
    assert math.isnan(found[1])


def test_a_table_keeps_the_returns() -> None:
    pytest.importorskip("pyarrow")
    pool = process_rewarded(EasyPool(Limits()))
    pool.complete("t", "p", OUTCOME)
    leased = pool.lease(1)
    assert leased is not None
    again = batch_from_arrow(batch_of(leased[1]).to_arrow())
    assert again.returns_T.tolist() == [pytest.approx(2.7)]


rewards = st.none() | st.sampled_from([-1.0, 0.0, 0.1, 0.25, 0.3, 0.7, 1.0])
step_plans = st.tuples(rewards, st.booleans(), st.sampled_from(Exactness), st.booleans())


@given(plans=st.lists(step_plans, min_size=1, max_size=5), outcome=rewards, data=st.data())
def test_the_return_depends_on_the_rewards_alone(plans: list[Any], outcome: float | None, data: st.DataObject) -> None:
    """Whoever gives them (steps as they are submitted, give_reward, complete), in any order, with any fork and any
    filter."""
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    given_later: list[RewardGiven] = []
    steps = []
    for n, (reward, is_side_call, exactness, forks) in enumerate(plans):
        comes_with_step = data.draw(st.booleans())
        prompt = [50 + n, 1] if forks else list(range(1, 2 + n))
        step = make_step(
            uid=str(n),
            step_index=n,
            prompt_ids=prompt,
            untrainable=SIDE_CALL if is_side_call else None,
            exactness=exactness,
            reward=reward if comes_with_step else None,
        )
        steps.append(step)
        if reward is not None and not comes_with_step:
            given_later.append(RewardGiven(trajectory_uid="t", prompt_uid="p", value=reward, step_index=n))
    for step in data.draw(st.permutations(steps)):
        pool.submit([step])
    by_complete = outcome if data.draw(st.booleans()) else None
    if outcome is not None and by_complete is None:
        given_later.append(RewardGiven(trajectory_uid="t", prompt_uid="p", value=outcome))
    for reward_given in data.draw(st.permutations(given_later)):
        assert pool.ingest.reward(reward_given)
    pool.complete("t", "p", by_complete)
    values = [plan[0] for plan in plans if plan[0] is not None] + ([] if outcome is None else [outcome])
    expected = math.fsum(values) if values else math.nan
    filters: list[dict[str, Any]] = [
        {"min_exactness": grade, "untrainable": untrainable} for grade in Exactness for untrainable in (False, True)
    ]
    taken = 0
    for step_filter in filters:
        if not any(_is_taken(step, step_filter) for step in steps):
            continue
        leased = pool.lease(1, **step_filter)
        assert leased is not None
        np.testing.assert_equal(batch_of(leased[1]).returns_T, [expected])
        pool.leasing.nack(leased[0])
        taken += 1
    assert taken
    stored, _ = pool.view.read([("t", "p")])
    apart = take_apart(stored)
    assert apart.total() == (None if math.isnan(expected) else expected)
    np.testing.assert_equal(put_together(stored, apart).rewards_S, stored.rewards_S)


def _is_taken(step: Any, step_filter: dict[str, Any]) -> bool:
    is_exact = step.exactness.at_least(step_filter["min_exactness"])
    return is_exact and (step_filter["untrainable"] or step.untrainable is None)


@given(plans=st.lists(rewards, min_size=1, max_size=4), outcome=rewards)
def test_stored_rewards_are_told_apart_and_put_together(plans: list[float | None], outcome: float | None) -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=str(n), step_index=n, reward=reward) for n, reward in enumerate(plans)])
    pool.complete("t", "p", outcome)
    stored, _ = pool.view.read([("t", "p")])
    apart = take_apart(stored)
    total = math.fsum(value for value in [*plans, outcome] if value is not None)
    assert (apart.total() or 0.0) == total
    if outcome is not None and apart.outcome is not None:
        apart.outcome.value += 1.0
        assert apart.total() == pytest.approx(total + 1.0)


def test_a_padded_row_has_the_return_of_its_trajectory() -> None:
    pool = process_rewarded(EasyPool(Limits()))
    pool.complete("t", "p", OUTCOME)
    leased = pool.lease(1)
    assert leased is not None
    assert batch_of(leased[1]).padded(8, 8).returns_S.tolist() == [pytest.approx(2.7)] * 3


values = st.sampled_from([-1.0, 0.0, 0.25, 0.3, 1.0])


@given(own=st.lists(st.none() | values, min_size=2, max_size=4), outcome=values)
def test_a_workers_score_gives_the_return_that_the_same_rewards_give(own: list[float | None], outcome: float) -> None:
    pools = [EasyPool(Limits(require_reward=True)) for _ in range(2)]
    for pool in pools:
        pool.register(Registration("t", "p"))
        pool.submit([make_step(uid=str(n), step_index=n) for n in range(len(own))])
        pool.complete("t", "p")
    by_worker, by_hand = pools
    by_worker.take_unscored()
    total = outcome + math.fsum(reward for reward in own if reward is not None)
    assert by_worker.judge("t", "p", Score(total, step_rewards=tuple(own)))
    for n, reward in enumerate(own):
        if reward is not None:
            by_hand.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=reward, step_index=n))
    by_hand.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=outcome))
    assert returns(by_worker) == [pytest.approx(returns(by_hand)[0], abs=1e-9)]


def stored_group(outcome: float | None = OUTCOME) -> StepGroup:
    """A trajectory with process rewards, as an archive or an export has it."""
    pool = process_rewarded(EasyPool(Limits()))
    pool.complete("t", "p", outcome)
    columns, _ = pool.view.read([("t", "p")])
    return StepGroup(columns, "", "train")


def test_an_imported_trajectory_keeps_its_outcome_reward_apart() -> None:
    columns, registrations = message([stored_group()], set(), None)
    pool = EasyPool(Limits())
    assert pool.ingest.submit_groups(columns, registrations) == [SubmitVerdict.ACCEPTED] * 3
    (steps,) = pool.take(1) or [[]]
    assert [step.reward for step in steps] == list(PROCESS)
    assert steps[0].outcome_reward == OUTCOME
    assert return_of(steps) == pytest.approx(2.7)


@pytest.mark.parametrize(
    ("source", "step_index", "value", "expected"),
    [
        ("judge", None, 0.5, 0.3 + 0.7 + 0.9 + 0.5),
        ("judge", 2, 0.0, 0.3 + 0.7 + 0.0 + 0.8),
        ("curation:ann", None, 0.5, 0.5),
    ],
    ids=["the outcome", "a step", "a person's"],
)
def test_a_late_reward_changes_only_what_it_is_for(
    source: str, step_index: int | None, value: float, expected: float
) -> None:
    late = LateReward(
        trajectory_uid="t", prompt_uid="p", value=value, source=source, step_index=step_index, revision=9, at=1.0
    )
    columns = LateRewards([late_rewards_table([late])]).apply(stored_group()).columns
    assert return_of(unpack(columns, copy=False)) == pytest.approx(expected)
