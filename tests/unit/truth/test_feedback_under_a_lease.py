"""Feedback that comes while a trainer has the data: it counts if the data comes back."""

from collections.abc import Callable

import pytest

from rig.builders import EasyPool, make_step
from stepwell.errors import Conflict
from stepwell.pool.api.leasing import Settlement, Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import LAST_STEP, Registration, RewardGiven
from stepwell.pool.client.batch import batch_of
from stepwell.pool.slices.curation import Curation, CurationAction


def thumb(pool: EasyPool, uid: str, value: float, *, prompt: str = "p", step: int | None = None) -> bool:
    return pool.ingest.reward(
        RewardGiven(trajectory_uid=uid, prompt_uid=prompt, value=value, source="thumb", step_index=step, notes="why")
    )


def expire(pool: EasyPool, lease_uid: str) -> None:
    pool.advance(1_000)
    assert pool.leasing.ack(lease_uid) is Settlement.EXPIRED


def nack(pool: EasyPool, lease_uid: str) -> None:
    assert pool.leasing.nack(lease_uid) is Settlement.DONE


def a_leased_pair() -> tuple[EasyPool, str]:
    pool = EasyPool(Limits(group_size=2, history_size=4))
    for n in range(2):
        pool.rollout(f"r{n}", "p", float(n), size=2)
    leased = pool.lease(1)
    assert leased is not None
    assert batch_of(leased[1]).returns_T.tolist() == [0, 1]
    return pool, leased[0]


@pytest.mark.parametrize("end", [nack, expire])
def test_it_counts_if_the_batch_comes_back(end: Callable[[EasyPool, str], None]) -> None:
    pool, lease = a_leased_pair()
    assert not thumb(pool, "r1", 5.0), "it counts for nothing yet"
    assert not thumb(pool, "r1", -1.0)
    end(pool, lease)
    again = pool.lease(1)
    assert again is not None
    batch = batch_of(again[1])
    assert batch.returns_T.tolist() == [0, -1], "the last one counts"
    assert batch.columns.metadata[1]["reward"] == {"notes": "why"}


def test_the_lease_gives_the_same_again_while_it_lasts() -> None:
    pool, _ = a_leased_pair()
    thumb(pool, "r1", -1.0)
    pool.leases -= 1
    again = pool.lease(1)
    assert again is not None
    assert batch_of(again[1]).returns_T.tolist() == [0, 1]


def test_it_is_late_if_the_batch_is_acknowledged() -> None:
    pool, lease = a_leased_pair()
    thumb(pool, "r1", -1.0)
    assert pool.leasing.ack(lease) is Settlement.DONE
    (group,) = pool.take(1, history=1.0) or [[]]
    assert [step.reward for step in group] == [0, 1]


def test_it_counts_for_its_step() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=str(n), started_at=n) for n in range(3)])
    pool.complete("t", "p", 1.0)
    leased = pool.lease(1)
    assert leased is not None
    thumb(pool, "t", 0.5, step=0)
    thumb(pool, "t", -1.0, step=LAST_STEP)
    with pytest.raises(Conflict, match="no step 7"):
        thumb(pool, "t", 1.0, step=7)
    nack(pool, leased[0])
    again = pool.lease(1)
    assert again is not None
    assert again[1].columns.rewards_S.tolist()[0] == 0.5
    assert batch_of(again[1]).returns_T.tolist() == [0.5]


def test_it_counts_for_a_single_step_that_comes_back_and_for_none_that_is_trained() -> None:
    pool = EasyPool(Limits(require_reward=True))
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=str(n), started_at=n) for n in range(2)])
    for step in range(2):
        assert thumb(pool, "t", 0.5, step=step)
    first, second = pool.lease(1, unit=Unit.STEPS), pool.lease(1, unit=Unit.STEPS)
    assert first is not None
    assert second is not None
    assert not thumb(pool, "t", -1.0, step=0)
    assert not thumb(pool, "t", -1.0, step=1)
    assert pool.leasing.ack(first[0]) is Settlement.DONE
    nack(pool, second[0])
    assert not thumb(pool, "t", 1.0, step=0)
    again = pool.lease(1, unit=Unit.STEPS)
    assert again is not None
    assert again[1].columns.rewards_S.tolist() == [-1]
    assert pool.lease(1, unit=Unit.STEPS) is None


def test_the_reward_of_a_person_stays() -> None:
    pool, lease = a_leased_pair()
    thumb(pool, "r1", -1.0)
    relabel = Curation(action=CurationAction.RELABEL, trajectory_uid="r1", prompt_uid="p", by="ana", reward=3.0)
    pool.curator.curate(relabel)
    thumb(pool, "r1", -1.0)
    nack(pool, lease)
    again = pool.lease(1)
    assert again is not None
    assert batch_of(again[1]).returns_T.tolist() == [0, 3]


def test_what_a_person_rejected_goes_with_it() -> None:
    pool, lease = a_leased_pair()
    thumb(pool, "r1", -1.0)
    pool.curator.curate(Curation(action=CurationAction.REJECT, trajectory_uid="r1", prompt_uid="p", by="ana"))
    nack(pool, lease)
    (group,) = pool.take(1) or [[]]
    assert [step.trajectory_uid for step in group] == ["r0"]
