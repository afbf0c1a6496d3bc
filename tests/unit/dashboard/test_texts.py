from stepwell.core.sight import State, Summary
from stepwell.dashboard.texts import Texts
from tests.unit.dashboard.summaries import make_summary


def names(rows: list[Summary]) -> list[str]:
    return [row.trajectory_uid for row in rows]


def test_the_newest_are_wanted_first_a_few_at_a_time() -> None:
    texts = Texts()
    for number in range(5):
        texts.tell(make_summary(f"t{number}", started_at=number, tokens=10))
    assert names(texts.next(2, 1_000)) == ["t4", "t3"]
    assert names(texts.next(10, 15)) == ["t2"]
    assert names(texts.next(10, 1)) == ["t1"], "at least one, however long it is"
    assert names(texts.next(10, 1_000)) == ["t0"]
    assert texts.next(10, 1_000) == []


def test_a_conversation_that_has_grown_is_wanted_again_and_found_meanwhile() -> None:
    texts, row = Texts(), make_summary(steps=1)
    texts.tell(row)
    texts.put(texts.next(1, 1_000)[0], "Hello WORLD")
    texts.tell(row)
    assert texts.waiting == 0
    texts.tell(make_summary(steps=2))
    assert texts.waiting == 1
    assert texts.contains(("t", "p"), "world")
    assert not texts.contains(("t", "p"), "moon")
    assert not texts.contains(("unknown", "p"), "world")


def test_what_was_dropped_or_has_no_step_is_not_wanted() -> None:
    texts = Texts()
    texts.tell(make_summary("empty", steps=0))
    texts.tell(make_summary("dropped"))
    texts.tell(make_summary("dropped", state=State.DROPPED))
    assert texts.next(10, 1_000) == []


def test_when_it_is_full_the_oldest_go_and_are_not_asked_for_again() -> None:
    texts = Texts(max_bytes=2_500)
    rows = [make_summary(f"t{number}", started_at=number) for number in range(4)]
    for row in reversed(rows):
        texts.put(row, "x" * 1_000)
    assert [texts.contains((row.trajectory_uid, "p"), "x") for row in rows] == [False, False, True, True]
    texts.tell(rows[0])
    assert texts.waiting == 0
    texts.put(make_summary("new", started_at=9), "y" * 1_000)
    assert [texts.contains((row.trajectory_uid, "p"), "x") for row in rows] == [False, False, False, True]
    assert len(texts) == 2


def test_what_is_no_longer_listed_is_forgotten() -> None:
    texts = Texts()
    texts.put(make_summary("a"), "text")
    texts.tell(make_summary("b"))
    texts.leave([("a", "p"), ("b", "p"), ("never heard of", "p")])
    assert (len(texts), texts.waiting) == (0, 0)
