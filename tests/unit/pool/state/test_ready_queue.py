"""The queue of what is ready, against a plain list."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from stepwell.pool.state.queues import ReadyQueue

from stepwell.pool.api.leasing import UserLimit

users = st.sampled_from(("", "a", "b", "c", "d"))
changes = st.lists(st.tuples(st.booleans(), st.integers(0, 20), users), max_size=60)
limits = st.builds(UserLimit, st.integers(0, 4), st.dictionaries(users.filter(bool), st.integers(0, 4)))


@given(changes=changes, limit=limits, count=st.integers(0, 12))
def test_the_oldest_are_those_that_a_scan_of_the_whole_queue_finds(
    changes: list[tuple[bool, int, str]], limit: UserLimit, count: int
) -> None:
    queue: ReadyQueue[tuple[int]] = ReadyQueue(by_user=True)
    known: dict[int, str] = {}
    for comes, number, user in changes:
        if comes:
            queue.add((number,), user)
            known[number] = user
        else:
            queue.discard((number,))
            known.pop(number, None)
    expected = limit.keep(sorted(known), known.__getitem__)[:count]
    assert queue.oldest(count, limit) == [(number,) for number in expected]
    assert queue.oldest(count) == [(number,) for number in sorted(known)[:count]]
    assert {number: queue.user_of((number,)) for number in known} == known
    ready = Counter(user for user in known.values() if user)
    assert queue.held_back(limit) == {u: n - limit.room(u) for u, n in ready.items() if n > limit.room(u)}


def test_a_choice_does_not_look_at_all_that_one_user_has_waiting() -> None:
    class CountedQueue(ReadyQueue[tuple[int]]):
        def smallest(self, count: int) -> list[tuple[int]]:
            raise AssertionError("the whole queue is scanned")

    queue = CountedQueue(by_user=True)
    for number in range(10_000):
        queue.add((number,), "eager")
    for number in range(10_000, 10_008):
        queue.add((number,), f"u{number}")
    assert queue.oldest(8, UserLimit(2)) == [(0,), (1,), *((n,) for n in range(10_000, 10_006))]
