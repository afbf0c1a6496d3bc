import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import ids_array

sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def stored(store: PrefixTree) -> int:
    return sum(len(branch.tail) for branch in store._branches)


@given(sequences)
def test_every_sequence_is_read_back_whatever_came_after_it(given_sequences: list[list[int]]) -> None:
    store, again = PrefixTree(), PrefixTree()
    places = []
    for tokens in given_sequences:
        placement = store.place(ids_array(tokens))
        places.append((placement.branch, tokens))
        assert again.restore(placement.base, placement.shared, placement.added) == placement.branch
    for branch, tokens in places:
        assert store.read(branch, len(tokens)).tolist() == tokens
        assert again.read(branch, len(tokens)).tolist() == tokens


@given(sequences)
def test_nothing_is_stored_that_was_there_as_a_prefix(given_sequences: list[list[int]]) -> None:
    store = PrefixTree()
    for number, tokens in enumerate(given_sequences):
        before = given_sequences[:number]
        longest = max((shared(tokens, other) for other in before), default=0)
        assert len(store.place(ids_array(tokens)).added) == len(tokens) - longest


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_conversation_costs_its_final_length() -> None:
    store = PrefixTree()
    context = np.empty(0, np.int32)
    for turn in range(200):
        context = np.concatenate([context, np.full(500, turn, np.int32)])
        store.place(context)
    assert stored(store) == len(context) == 100_000
    assert store.forks == 0


def test_turns_whose_thinking_is_dropped_fork_at_the_difference() -> None:
    store = PrefixTree()
    store.place(ids_array([1, 2, 3, 9, 9, 9]))
    placement = store.place(ids_array([1, 2, 3, 4, 5]))
    assert (placement.shared, placement.added.tolist()) == (3, [4, 5])
    assert store.forks == 1
