import asyncio

import pytest
from stepwell.gateway.requests import LONGEST_KEY, read_call_headers
from stepwell.gateway.response_writer import A_PART, AN_ANSWER, KEPT_SECONDS, RequestDeduplicator, SharedResponse

from rig.waiting import until
from stepwell.errors import BadRequest
from stepwell.pool.api.producing import TrajectoryRef

REF = TrajectoryRef("t", "p")
EMPTY = AN_ANSWER + A_PART
"""What an answer of one part without a body counts."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ignore() -> None:
    """No one is told."""


async def heard(shared: SharedResponse) -> list[tuple[bytes, bool]]:
    return [part async for part in shared.parts()]


def answered(
    joins: RequestDeduplicator, key: str, body: bytes = b"{}", status: int = 200, *, keep: bool = True, by: str = ""
) -> SharedResponse:
    """A call led to its end."""
    shared = joins.lead(key, ignore, by)
    shared.begin(status, [])
    shared.add(body, more=False)
    joins.end(key, shared, keep=keep)
    return shared


async def test_who_joins_gets_the_whole_answer_whenever_that_is() -> None:
    shared = SharedResponse(ignore)
    early = asyncio.create_task(heard(shared))
    shared.add(b"a", more=True)
    await asyncio.sleep(0)
    midway = asyncio.create_task(heard(shared))
    shared.add(b"b", more=True)
    await asyncio.sleep(0)
    shared.add(b"c", more=False)
    whole = [(b"a", True), (b"b", True), (b"c", False)]
    assert [await early, await midway, await heard(shared)] == [whole] * 3


async def test_parts_reach_a_follower_as_they_come() -> None:
    shared, got = SharedResponse(ignore), list[bytes]()

    async def follow() -> None:
        async for data, _ in shared.parts():
            got.append(data)

    following = asyncio.create_task(follow())
    shared.add(b"a", more=True)
    await until(lambda: got == [b"a"], "the first part")
    shared.add(b"b", more=True)
    await until(lambda: got == [b"a", b"b"], "the second part")
    assert not following.done()
    shared.give_up()
    await following


async def test_a_follower_that_is_cancelled_takes_no_other_with_it() -> None:
    shared = SharedResponse(ignore)
    leaving, staying = asyncio.create_task(heard(shared)), asyncio.create_task(heard(shared))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    shared.add(b"a", more=False)
    assert await staying == [(b"a", False)]
    assert leaving.cancelled()


def test_a_call_is_deserted_once_the_last_who_waits_has_left() -> None:
    left = list[str]()
    shared = SharedResponse(lambda: left.append("gone"))
    shared.listeners += 1
    shared.leave()
    assert left == []
    shared.leave()
    assert left == ["gone"]


def test_leaving_after_the_end_deserts_nothing() -> None:
    left = list[str]()
    shared = SharedResponse(lambda: left.append("gone"))
    shared.add(b"a", more=False)
    shared.leave()
    assert left == []


def test_a_call_in_flight_is_found_by_its_key_and_no_longer_after_it() -> None:
    joins = RequestDeduplicator(Clock())
    assert joins.find("k") is None
    shared = joins.lead("k", ignore)
    assert joins.find("k") is shared
    assert joins.find("other") is None
    joins.end("k", shared, keep=False)
    assert joins.find("k") is None
    assert shared.ended


def test_no_one_joins_a_call_that_all_have_left() -> None:
    joins = RequestDeduplicator(Clock())
    deserted = joins.lead("k", ignore)
    deserted.leave()
    assert joins.find("k") is None
    again = joins.lead("k", ignore)
    joins.end("k", deserted, keep=False)
    assert joins.find("k") is again, "the end of the deserted call is not the new one's"


async def test_a_kept_answer_is_given_again() -> None:
    joins = RequestDeduplicator(Clock())
    answered(joins, "k", b"body")
    kept = joins.find("k")
    assert kept is not None
    assert (kept.status, await heard(kept)) == (200, [(b"body", False)])


def test_an_answer_is_kept_for_a_time() -> None:
    clock = Clock()
    joins = RequestDeduplicator(clock)
    shared = answered(joins, "k")
    clock.now += KEPT_SECONDS
    assert joins.find("k") is shared
    clock.now += 1
    assert joins.find("k") is None


@pytest.mark.parametrize(("status", "keep"), [(400, True), (502, True), (0, True), (200, False)])
def test_a_failure_or_what_had_no_key_is_not_kept(status: int, keep: bool) -> None:
    joins = RequestDeduplicator(Clock())
    answered(joins, "k", status=status, keep=keep)
    assert joins.find("k") is None


def test_the_oldest_answers_make_room_for_the_newest() -> None:
    joins = RequestDeduplicator(Clock(), kept_answers=2)
    for key in "abc":
        answered(joins, key)
    assert [key for key in "abc" if joins.find(key)] == ["b", "c"]
    assert joins.dropped == {"room": 1}


def test_answers_are_bounded_in_bytes() -> None:
    joins = RequestDeduplicator(Clock(), kept_answers=100, kept_bytes=2 * EMPTY + 10)
    answered(joins, "a", b"x" * 4)
    answered(joins, "b", b"x" * 6)
    assert joins.find("a")
    answered(joins, "c", b"x")
    assert [key for key in "abc" if joins.find(key)] == ["b", "c"]
    answered(joins, "d", b"x" * (2 * EMPTY))
    assert [key for key in "abcd" if joins.find(key)] == []
    answered(joins, "e", b"x" * EMPTY)
    assert joins.find("e"), "what was dropped no longer counts"
    assert joins.dropped == {"room": 4}


def test_one_callers_answers_push_out_its_own() -> None:
    joins = RequestDeduplicator(Clock(), kept_of_a_caller=2 * EMPTY)
    answered(joins, "honest", b"", by="honest")
    for key in "abc":
        answered(joins, key, b"", by="greedy")
    assert [key for key in ("honest", *"abc") if joins.find(key)] == ["honest", "b", "c"]
    answered(joins, "d", b"x" * (2 * EMPTY), by="greedy")
    assert [key for key in ("honest", *"abcd") if joins.find(key)] == ["honest"]
    assert joins.dropped == {"caller": 4}


def test_what_is_too_old_is_dropped_without_being_asked_for() -> None:
    clock = Clock()
    joins = RequestDeduplicator(clock)
    old = answered(joins, "old")
    clock.now += KEPT_SECONDS + 1
    answered(joins, "new")
    clock.now -= KEPT_SECONDS + 1
    assert joins.find("old") is None
    assert old.ended
    assert joins.dropped == {"age": 1}


def test_a_newer_answer_to_the_same_key_replaces_the_older() -> None:
    clock = Clock()
    joins = RequestDeduplicator(clock, kept_answers=100, kept_bytes=EMPTY + 10)
    for _ in range(5):
        latest = answered(joins, "k", b"x" * 9)
        assert joins.find("k") is latest
        clock.now += 1


def test_an_idempotency_key_is_short() -> None:
    assert read_call_headers([(b"idempotency-key", b"k" * LONGEST_KEY)]).idempotency_key
    with pytest.raises(BadRequest, match="an Idempotency-Key has at most 255 bytes"):
        read_call_headers([(b"idempotency-key", b"k" * (LONGEST_KEY + 1))])


def test_headers_say_what_a_call_is() -> None:
    marks = read_call_headers(
        [
            (b"host", b"h"),
            (b"idempotency-key", b"k1"),
            (b"x-stainless-retry-count", b"0"),
            (b"x-stepwell-call", b"side"),
            (b"traceparent", b"00-1-2-3"),
        ]
    )
    assert (marks.idempotency_key, marks.is_first_try, marks.kind, marks.traceparent) == (
        b"k1",
        True,
        "side",
        b"00-1-2-3",
    )
    silent = read_call_headers([])
    assert (silent.idempotency_key, silent.is_first_try, silent.kind, silent.traceparent) == (None, False, None, None)
    assert read_call_headers([(b"idempotency-key", b"")]).idempotency_key is None
    assert read_call_headers([(b"x-stepwell-call", b"\xff")]).kind == "ÿ"


@pytest.mark.parametrize("other", [TrajectoryRef("u", "p"), TrajectoryRef("t", "q")])
def test_two_calls_are_one_by_key_or_by_body_within_one_trajectory(other: TrajectoryRef) -> None:
    silent, keyed = read_call_headers([]), read_call_headers([(b"idempotency-key", b"k")])
    assert silent.key(REF, b"body") == silent.key(REF, b"body")
    assert silent.key(REF, b"body") != silent.key(REF, b"other")
    assert silent.key(REF, b"body") != silent.key(other, b"body")
    assert silent.key(REF, b"body", "models/a") != silent.key(REF, b"body", "models/b")
    assert silent.shared_key(b"body", "models/a") != silent.shared_key(b"body", "models/b")
    assert (
        silent.shared_key(b"body", "models/a") == silent.shared_key(b"body", "models/a") != silent.shared_key(b"body")
    )
    assert keyed.key(REF, b"body", "models/a") == keyed.key(REF, b"body", "models/b")
    assert keyed.shared_key(b"body", "models/a") == keyed.shared_key(b"body", "models/b")
    assert keyed.key(REF, b"body") == keyed.key(REF, b"other")
    assert keyed.key(REF, b"body") != keyed.key(other, b"body")


def test_a_first_try_is_joined_by_key_only() -> None:
    first, retry = ([(b"x-stainless-retry-count", count)] for count in (b"0", b"1"))
    assert not read_call_headers(first).may_join
    assert read_call_headers(retry).may_join
    assert read_call_headers(retry).key(REF, b"body") == read_call_headers(first).key(REF, b"body")
    assert read_call_headers([*first, (b"idempotency-key", b"k")]).may_join
