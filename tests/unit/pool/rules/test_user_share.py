"""Sessions of one user cannot dominate a batch."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.builders import EasyPool, make_step
from stepwell.pool.api.leasing import BatchRequest, LeasedGroups, Order, Unit, max_per_user
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.sessions import SESSION, session_metadata
from stepwell.steps.columns import unpack

UNITS = tuple(Unit)


def pool_of(*users: str, share: float | None = 0.5, **limits: Any) -> EasyPool:
    """A session of one step for each; the uid has the number and the user."""
    pool = EasyPool(Limits(max_share_per_user=share, **limits))
    for number, user in enumerate(users):
        session(pool, number, user)
    return pool


def session(pool: EasyPool, number: int, user: str, *, completes: bool = True) -> None:
    pool.advance(float(number))
    uid = f"{number}-{user}"
    metadata = {SESSION: session_metadata(uid, user)} if user else {}
    pool.register(Registration(uid, f"p{number}", group_size=1, metadata=metadata))
    pool.submit([make_step(uid, f"p{number}", uid=uid, started_at=float(number))])
    if completes:
        pool.complete(uid, f"p{number}", 1.0)


def taken(leased: tuple[str, LeasedGroups] | None) -> list[str] | None:
    return None if leased is None else [step.trajectory_uid for step in unpack(leased[1].columns, copy=False)]


@pytest.mark.parametrize("unit", UNITS)
def test_later_ones_of_others_are_taken_and_the_rest_of_the_user_waits(unit: Unit) -> None:
    pool = pool_of("ann", "ann", "ann", "ann", "bob", "", "")
    assert taken(pool.lease(4, unit=unit)) == ["0-ann", "1-ann", "4-bob", "5-"]
    assert pool.stats().sessions.deferred == 2
    assert taken(pool.lease(2, unit=unit)) == ["2-ann", "6-"]
    assert pool.stats().sessions.deferred == 3


@pytest.mark.parametrize("unit", UNITS)
def test_a_batch_is_not_filled_up_with_one_user_and_says_so(unit: Unit) -> None:
    pool = pool_of("ann", "ann", "ann")
    request = BatchRequest(count=2, channel="train", unit=unit)
    assert pool.lease(2, unit=unit) is None
    assert pool.waiting_for(request).endswith(
        f"; 2 ready {unit} are held back by --max-share-per-user 0.5, which allows 1 of one user in a batch of 2: "
        "2 of user 'ann'"
    )
    assert pool.ready_items(request) == ([0.0], ("ann",))
    assert pool.stats().sessions.deferred == 0
    session(pool, 3, "bob")
    assert taken(pool.lease(2, unit=unit)) == ["0-ann", "3-bob"]


def test_the_message_names_some_of_many_users() -> None:
    pool = pool_of(*"aabbbccdd", share=0.1)
    text = pool.waiting_for(BatchRequest(count=9, channel="train"))
    assert "5 ready groups are held back" in text
    assert text.endswith("2 of user 'b', 1 of user 'a', 1 of user 'c' and 1 more users")


@pytest.mark.parametrize("unit", UNITS)
def test_without_the_setting_the_oldest_are_taken_whoever_they_are_of(unit: Unit) -> None:
    pool = pool_of("ann", "ann", "bob", share=None)
    assert taken(pool.lease(2, unit=unit)) == ["0-ann", "1-ann"]
    assert pool.ready_items(BatchRequest(count=2, channel="train", unit=unit)).users == ()
    assert "held back" not in pool.waiting_for(BatchRequest(count=9, channel="train", unit=unit))


def test_what_returns_is_limited_again() -> None:
    pool = pool_of("ann", "ann", "bob", "eve")
    leased = pool.lease(2)
    assert leased is not None
    pool.leasing.nack(leased[0])
    assert taken(pool.lease(2)) == ["0-ann", "2-bob"]


def test_in_strict_order_nothing_overtakes_an_unfinished_session() -> None:
    pool = pool_of("ann", "ann", "bob")
    session(pool, 3, "eve", completes=False)
    session(pool, 4, "dan")
    assert taken(pool.lease(2, order=Order.STRICT)) == ["0-ann", "2-bob"]
    assert pool.lease(2, order=Order.STRICT) is None
    assert taken(pool.lease(2)) == ["1-ann", "4-dan"]


def test_history_counts_too() -> None:
    pool = pool_of("ann", history_size=8)
    pool.take(1)
    for number, user in enumerate(("ann", "ann", "bob", "eve", "dan"), start=1):
        session(pool, number, user)
    groups = taken(pool.lease(4, history=0.25))
    assert groups == ["1-ann", "3-bob", "4-eve", "0-ann"]


def test_a_part_of_a_batch_has_what_it_is_told_of_each_user() -> None:
    pool = pool_of("ann", "ann", "ann", "bob", "bob", "eve")
    part = pool.lease(3, max_per_user=0, user_rooms={"ann": 2, "bob": 1})
    assert taken(part) == ["0-ann", "1-ann", "3-bob"]
    assert pool.lease(2, max_per_user=0, user_rooms={"bob": 1}) is None


def test_an_exact_batch_has_at_most_that_share_of_one_user() -> None:
    pool = pool_of(*["ann"] * 20, "bob", "eve", "")
    assert taken(pool.fill(4)) == ["0-ann", "1-ann", "20-bob", "21-eve"]
    assert pool.fill(4) is None
    assert taken(pool.fill(2)) == ["2-ann", "22-"]


names = st.sampled_from(("", "ann", "bob", "eve"))


@given(
    users=st.lists(names, max_size=16),
    share=st.floats(0.01, 1.0),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    unit=st.sampled_from(UNITS),
)
def test_every_batch_is_the_oldest_that_the_share_allows(
    users: list[str], share: float, counts: list[int], unit: Unit
) -> None:
    pool = pool_of(*users, share=share)
    left = [f"{number}-{user}" for number, user in enumerate(users)]
    for count in counts:
        seen: Counter[str] = Counter()
        allowed: list[str] = []
        for uid in left:
            user = uid.partition("-")[2]
            seen[user] += 1
            if not user or seen[user] <= max_per_user(share, count):
                allowed.append(uid)
        batch = taken(pool.lease(count, unit=unit))
        assert batch == (allowed[:count] if len(allowed) >= count else None)
        left = [uid for uid in left if uid not in (batch or ())]
