from stepwell.dashboard.follower import ENTRY_BYTES, SLACK, ConversationTexts, keys_with_text

from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from tests.unit.dashboard.summaries import make_summary


def names(rows: list[TrajectorySnapshot]) -> list[str]:
    return [row.trajectory_uid for row in rows]


def found(texts: ConversationTexts, text: str) -> list[str]:
    return sorted(key[0] for key in keys_with_text(texts.copy(), text))


def test_the_newest_are_wanted_first_a_few_at_a_time() -> None:
    texts = ConversationTexts()
    for number in range(5):
        texts.update(make_summary(f"t{number}", started_at=number, tokens=10))
    assert names(texts.take_wanted(2, 1_000)) == ["t4", "t3"]
    assert names(texts.take_wanted(10, 15)) == ["t2"]
    assert names(texts.take_wanted(10, 1)) == ["t1"], "at least one, however long it is"
    assert names(texts.take_wanted(10, 1_000)) == ["t0"]
    assert texts.take_wanted(10, 1_000) == []


def test_a_conversation_that_has_grown_is_wanted_again_and_found_meanwhile() -> None:
    texts, row = ConversationTexts(), make_summary(steps=1)
    texts.update(row)
    texts.put(texts.take_wanted(1, 1_000)[0], "Hello WORLD")
    texts.update(row)
    assert texts.waiting == 0
    texts.update(make_summary(steps=2))
    assert texts.waiting == 1
    assert found(texts, "World") == ["t"]
    assert found(texts, "moon") == []


def test_what_was_dropped_or_has_no_step_is_not_wanted() -> None:
    texts = ConversationTexts()
    texts.update(make_summary("empty", steps=0))
    texts.update(make_summary("dropped"))
    texts.update(make_summary("dropped", state=TrajectoryState.DROPPED))
    assert texts.take_wanted(10, 1_000) == []


def test_when_it_is_full_the_oldest_go_and_are_not_asked_for_again() -> None:
    texts = ConversationTexts(max_bytes=2_500 + 2 * ENTRY_BYTES)
    rows = [make_summary(f"t{number}", started_at=number) for number in range(4)]
    for row in reversed(rows):
        texts.put(row, "x" * 1_000)
    assert found(texts, "x") == ["t2", "t3"]
    texts.update(rows[0])
    assert texts.waiting == 0
    texts.put(make_summary("new", started_at=9), "y" * 1_000)
    assert found(texts, "x") == ["t3"]
    assert len(texts) == 2


def test_a_copy_stays_as_it_was() -> None:
    texts = ConversationTexts()
    texts.put(make_summary("a"), "text")
    before = texts.copy()
    texts.remove([("a", "p")])
    assert keys_with_text(before, "text") == [("a", "p")]
    assert found(texts, "text") == []


def test_what_comes_and_goes_leaves_nothing_behind() -> None:
    texts = ConversationTexts()
    for number in range(3 * SLACK):
        row = make_summary(f"t{number}", started_at=number)
        texts.update(row)
        texts.put(row, "text")
        texts.remove([(row.trajectory_uid, "p")])
    assert len(texts._oldest) <= SLACK + 2
    assert len(texts._newest) <= SLACK + 2
    texts.update(make_summary("last", started_at=-1))
    assert names(texts.take_wanted(1, 1_000)) == ["last"]


def test_what_is_no_longer_listed_is_forgotten() -> None:
    texts = ConversationTexts()
    texts.put(make_summary("a"), "text")
    texts.update(make_summary("b"))
    texts.remove([("a", "p"), ("b", "p"), ("never heard of", "p")])
    assert (len(texts), texts.waiting) == (0, 0)
