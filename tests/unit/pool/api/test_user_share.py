"""How much of one batch may come from one user."""

import pytest

from stepwell.pool.api.leasing import UserLimit, max_per_user


@pytest.mark.parametrize(
    ("share", "count", "most"), [(0.25, 8, 2), (0.25, 7, 1), (0.01, 8, 1), (1.0, 8, 8), (0.29, 100, 29), (0.1, 30, 3)]
)
def test_a_user_has_the_share_rounded_down_and_at_least_one(share: float, count: int, most: int) -> None:
    assert max_per_user(share, count) == most


def test_the_first_of_each_user_are_kept_and_all_of_nobody() -> None:
    items = ["a1", "a2", "1", "b1", "a3", "2", "3", "b2"]
    kept = UserLimit(2, {"b": 1}).keep(items, lambda item: item[:-1])
    assert kept == ["a1", "a2", "1", "b1", "2", "3"]


def test_what_was_taken_leaves_less_room() -> None:
    left = UserLimit(2, {"b": 1}).less(["a", "b", "", "b", "c", "c"])
    assert [left.room(user) for user in "abcd"] == [1, 0, 0, 2]
