import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepwell.steps.prefix_tree import ROOT, PrefixTree
from stepwell.steps.step import ids_array

sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def stored(tree: PrefixTree) -> int:
    return sum(len(node.tail) for node in tree._branches)


@given(sequences)
def test_every_sequence_is_read_back_whatever_came_after_it(given_sequences: list[list[int]]) -> None:
    tree, again = PrefixTree(), PrefixTree()
    places = []
    for tokens in given_sequences:
        placement = tree.place(ids_array(tokens))
        places.append((placement.branch, tokens))
        assert again.restore(placement.base, placement.shared, placement.added) == placement.branch
    for branch, tokens in places:
        assert tree.read(branch, len(tokens)).tolist() == tokens
        assert again.read(branch, len(tokens)).tolist() == tokens


@given(sequences)
def test_nothing_is_stored_that_was_there_as_a_prefix(given_sequences: list[list[int]]) -> None:
    tree = PrefixTree()
    for number, tokens in enumerate(given_sequences):
        before = given_sequences[:number]
        longest = max((shared(tokens, other) for other in before), default=0)
        assert len(tree.place(ids_array(tokens)).added) == len(tokens) - longest


@given(sequences)
def test_branches_agree_as_far_as_their_tokens_do(given_sequences: list[list[int]]) -> None:
    tree = PrefixTree()
    placed = [(tree.place(ids_array(tokens)).branch, tokens) for tokens in given_sequences]
    for first, a in placed:
        for second, b in placed:
            for length in range(min(len(a), len(b)) + 1):
                assert tree.agree(first, second, length) == (a[:length] == b[:length])


@given(sequences, sequences)
def test_a_tree_that_was_dumped_and_loaded_goes_on_as_the_other(
    before: list[list[int]], after: list[list[int]]
) -> None:
    tree = PrefixTree()
    for tokens in before:
        tree.place(ids_array(tokens))
    again = PrefixTree.load(tree.dump())
    assert again.is_like(tree)
    for tokens in after:
        mine, theirs = tree.place(ids_array(tokens)), again.place(ids_array(tokens))
        assert (mine.branch, mine.base, mine.shared) == (theirs.branch, theirs.base, theirs.shared)
    assert again.is_like(tree)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_conversation_costs_its_final_length() -> None:
    tree = PrefixTree()
    context = np.empty(0, np.int32)
    for turn in range(200):
        context = np.concatenate([context, np.full(500, turn, np.int32)])
        tree.place(context)
    assert stored(tree) == len(context) == 100_000
    assert tree.forks == 0


def test_turns_whose_thinking_is_dropped_fork_at_the_difference() -> None:
    tree = PrefixTree()
    tree.place(ids_array([1, 2, 3, 9, 9, 9]))
    placement = tree.place(ids_array([1, 2, 3, 4, 5]))
    assert (placement.shared, placement.added.tolist()) == (3, [4, 5])
    assert tree.forks == 1


@given(sequences)
def test_the_base_of_a_sequence_shares_most_with_it_of_all_before(given_sequences: list[list[int]]) -> None:
    tree = PrefixTree()
    placed = [(tree.place(ids_array(tokens)).branch, len(tokens)) for tokens in given_sequences]
    for order in (range(len(placed)), range(len(placed) - 1, -1, -1)):
        ordered = [given_sequences[place] for place in order]
        for place, (base, length) in enumerate(tree.bases([placed[place] for place in order])):
            assert length == max((shared(ordered[place], other) for other in ordered[:place]), default=0)
            assert base == ROOT if length == 0 else shared(ordered[place], ordered[base]) == length


def test_five_thousand_turns_that_fork_are_stored_read_and_found_without_recursion() -> None:
    """A template that drops the thinking of all turns but the last: each turn forks from the one before."""
    tree, again = PrefixTree(), PrefixTree()
    history = np.empty(0, np.int32)
    placements, turns = [], []
    for turn in range(5_000):
        thinking, said = np.full(4, 1_000_000 + turn, np.int32), np.full(6, turn, np.int32)
        tokens = np.concatenate([history, thinking, said])
        placements.append(tree.place(tokens))
        history = np.concatenate([history, said])
        turns.append(len(tokens))
    assert tree.forks == 4_999
    assert stored(tree) == 5_000 * 10 + 4_999 * 6  # what is said stands behind its thinking and in the history
    for placement in placements:
        assert again.restore(placement.base, placement.shared, placement.added) == placement.branch
    for turn in (0, 1, 2_500, 4_999):
        tokens = tree.read(placements[turn].branch, turns[turn])
        assert tokens[: 6 * turn].tolist() == history[: 6 * turn].tolist()
        assert tokens[6 * turn :].tolist() == [1_000_000 + turn] * 4 + [turn] * 6
        assert (again.read(placements[turn].branch, turns[turn]) == tokens).all()
    bases = tree.bases([(placement.branch, length) for placement, length in zip(placements, turns, strict=True)])
    assert bases[0] == (ROOT, 0)
    assert bases[1] == (ROOT, 0)
    assert [shared for _, shared in bases[2:]] == [6 * (turn - 1) for turn in range(2, 5_000)]


def test_forks_at_ever_earlier_places_make_a_deep_tree_that_is_read_without_recursion() -> None:
    tree = PrefixTree()
    trunk = np.arange(3_000, dtype=np.int32)
    branches = [(tree.place(trunk).branch, trunk)]
    for position in range(2_999, 0, -1):
        tokens = np.concatenate([trunk[:position], [-1]]).astype(np.int32)
        branches.append((tree.place(tokens).branch, tokens))
    for branch, tokens in branches[::500]:
        assert (tree.read(branch, len(tokens)) == tokens).all()
    assert len(tree.bases([(branch, len(tokens)) for branch, tokens in branches])) == 3_000
