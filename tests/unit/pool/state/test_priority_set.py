from hypothesis import given
from hypothesis import strategies as st
from stepwell.pool.state.queues import SLACK, PrioritySet


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
def test_it_agrees_with_a_sorted_set(operations: list[tuple[bool, int]]) -> None:
    ours: PrioritySet[tuple[int]] = PrioritySet()
    plain: set[tuple[int]] = set()
    for adds, number in operations:
        (ours.add if adds else ours.discard)((number,))
        (plain.add if adds else plain.discard)((number,))
        assert ours.first() == min(plain, default=None)
        assert ours.smallest(3) == sorted(plain)[:3]
        assert (len(ours), set(ours)) == (len(plain), plain)


def test_its_memory_follows_what_is_in_it() -> None:
    members: PrioritySet[tuple[int]] = PrioritySet()
    members.add((0,))
    for number in range(1, 10_000):
        members.add((number,))
        members.discard((number,))
    assert len(members._heap) <= 2 + SLACK + 1
