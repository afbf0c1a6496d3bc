import numpy as np
from stepwell.gateway.bridge.recorded_turns import OVERHEAD, RecentTurns, Turn

from stepwell.gateway.bridge.digests import conversation_digest_of, digest_request
from stepwell.steps.step import ids_array

LINEAGE = conversation_digest_of(
    digest_request({"messages": [{"role": "user", "content": "hello"}]}), {"content": "hi"}, {}
)


def turn(uid: str, length: int) -> Turn:
    return Turn(uid, ids_array(np.arange(length)), "stop", LINEAGE)


def lengths(turns: RecentTurns, trajectory_uid: str) -> dict[str, int]:
    return {kept.uid: len(kept.tokens) for kept in turns.of(trajectory_uid)}


def test_turns_that_continue_one_another_share_their_tokens() -> None:
    turns, parent = RecentTurns(), None
    for number in range(1, 6):
        child = turn(str(number), 1_000 * number)
        turns.add("t", child, parent)
        parent = child
    assert turns.nbytes == 4 * 5_000 + 5 * OVERHEAD
    assert lengths(turns, "t") == {str(number): 1_000 * number for number in range(1, 6)}
    for kept in turns.of("t"):
        assert kept.tokens.tolist() == list(range(len(kept.tokens)))


def test_turns_without_a_parent_share_the_tokens_with_which_they_begin() -> None:
    """As replies that were cut short: the engine renders the next prompt, and it is the same conversation."""
    turns = RecentTurns()
    for number in range(1, 6):
        turns.add("t", turn(str(number), 1_000 * number))
    assert turns.nbytes == 4 * 5_000 + 5 * OVERHEAD
    assert lengths(turns, "t") == {str(number): 1_000 * number for number in range(1, 6)}
    other = Turn("other", ids_array(np.arange(1, 7_001)), "stop", LINEAGE)
    turns.add("t", other)
    assert turns.nbytes == 4 * (5_000 + 7_000) + 6 * OVERHEAD
    assert [kept.tokens[0] for kept in turns.of("t")] == [0] * 5 + [1]


def test_a_fork_keeps_tokens_of_its_own() -> None:
    turns, parent = RecentTurns(), turn("parent", 10)
    turns.add("t", parent)
    for uid, length in (("one", 20), ("other", 30)):
        turns.add("t", turn(uid, length), parent)
    assert lengths(turns, "t") == {"parent": 10, "one": 20, "other": 30}
    assert turns.nbytes == 4 * (20 + 30) + 3 * OVERHEAD


def test_the_trajectories_that_were_used_longest_ago_are_forgotten_first() -> None:
    turns = RecentTurns(max_bytes=3 * (400 + OVERHEAD))
    for uid in "abc":
        turns.add(uid, turn(uid, 100))
    assert lengths(turns, "a") == {"a": 100}
    turns.add("d", turn("d", 100))
    assert [bool(turns.of(uid)) for uid in "abcd"] == [True, False, True, True]
    turns.add("e", turn("e", 10_000))
    assert (len(turns), turns.nbytes) == (0, 0)


def test_a_trajectory_that_is_forgotten_frees_its_bytes() -> None:
    turns = RecentTurns()
    turns.add("a", turn("a", 100))
    turns.add("b", turn("b", 50))
    turns.drop("a")
    turns.drop("unknown")
    assert (len(turns), turns.nbytes) == (1, 200 + OVERHEAD)
    assert not turns.of("a")
