"""A full channel is fair: who holds the most gives up first, and one agent cannot push out the others."""

from typing import Any

import pytest

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits, Overflow
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.api.sessions import SESSION, SUBJECT, session_metadata
from stepwell.steps.step import JsonObject

KB = 1_050_000
"""The records of a step and its group are a twentieth of what a call has."""


def pool(**limits: Any) -> EasyPool:
    return EasyPool(Limits(**limits))


def held(p: EasyPool) -> set[str]:
    return set(p.state.trajectories)


def call(p: EasyPool, uid: str, n: int, prompt_tokens: int = 10_000) -> SubmitVerdict:
    """A call that shares no tokens with the ones before it."""
    ids = [n + 2, *range(prompt_tokens - 1)]
    return p.submit([make_step(uid, uid, uid=f"{uid}-{n}", started_at=n, prompt_ids=ids)])[0]


def one_call(p: EasyPool, uid: str, metadata: JsonObject | None = None, source: str = "", tokens: int = 10_000) -> None:
    p.register(Registration(uid, uid, metadata=metadata, source=source))
    assert call(p, uid, 0, tokens) is SubmitVerdict.ACCEPTED


def of_user(user: str) -> JsonObject:
    return {SESSION: session_metadata("s", user)}


def of_subject(subject: str) -> JsonObject:
    return {SUBJECT: subject}


def test_fifty_calls_of_one_agent_push_out_nobody() -> None:
    p = pool(max_bytes=KB)
    others = {f"t{n}" for n in range(9)}
    for uid in sorted(others):
        one_call(p, uid, tokens=19_000)
    p.register(Registration("greedy", "greedy"))
    verdicts = [call(p, "greedy", n) for n in range(50)]
    assert others <= held(p)
    assert set(verdicts) == {SubmitVerdict.ACCEPTED, SubmitVerdict.TOO_LARGE}
    assert p.stats().refused == {"too_large": verdicts.count(SubmitVerdict.TOO_LARGE)}
    assert p.state.trajectories["greedy"].nbytes <= KB / 4, "a quarter is the most for one trajectory"


def test_in_a_full_channel_the_large_trajectory_goes_and_not_the_others() -> None:
    p = pool(max_bytes=KB)
    others = {f"t{n}" for n in range(20)}
    for uid in sorted(others):
        one_call(p, uid, tokens=12_000)
    p.register(Registration("greedy", "greedy"))
    verdicts = [call(p, "greedy", n) for n in range(50)]
    assert len(others & held(p)) >= 19, "it may take the place of one, as any newcomer does"
    assert "greedy" not in held(p)
    assert verdicts[-1] is SubmitVerdict.LATE
    snapshot = p.state.last_snapshot("greedy")
    assert snapshot is not None
    assert (snapshot.cause, snapshot.note) == ("evicted", "its producer held the most of it")


@pytest.mark.parametrize("limits", [{"max_bytes": KB}, {"max_queue_size": 24}], ids=["bytes", "groups"])
@pytest.mark.parametrize("of", [of_user, of_subject], ids=["users", "subjects"])
def test_many_groups_of_one_user_push_out_nobody(limits: dict[str, int], of: Any) -> None:
    p = pool(**limits)
    for user in ("ann", "ben", "cid"):
        for n in range(2):
            one_call(p, f"{user}{n}", of(user))
    for n in range(100):
        one_call(p, f"bot{n:02}", of("bot"))
    assert {"ann0", "ann1", "ben0", "ben1", "cid0", "cid1"} <= held(p)
    bots = sorted(uid for uid in held(p) if uid.startswith("bot"))
    assert bots == [f"bot{n}" for n in range(100 - len(bots), 100)], "of its own, the oldest go first"


def test_one_environment_does_not_push_out_another() -> None:
    p = pool(max_queue_size=20)
    for n in range(5):
        one_call(p, f"slow{n}", source="slow")
    for n in range(50):
        one_call(p, f"fast{n}", source="fast")
    assert {f"slow{n}" for n in range(5)} <= held(p)


def test_of_producers_that_hold_the_same_the_oldest_group_goes_first() -> None:
    p = pool(max_queue_size=6)
    for n in range(12):
        one_call(p, f"t{n:02}", of_user("abc"[n % 3]))
        assert sorted(held(p)) == [f"t{m:02}" for m in range(max(0, n - 5), n + 1)]


def test_small_groups_are_not_preferred_where_no_group_is_large() -> None:
    """Else a full queue would teach the policy to be brief."""
    p = pool(max_bytes=KB)
    for n in range(60):
        one_call(p, f"t{n:02}", tokens=12_000 if n % 2 else 1_200)
    uids = sorted(held(p))
    assert uids == [f"t{n}" for n in range(60 - len(uids), 60)]


def test_a_group_that_comes_back_from_a_lease_counts_for_its_producer_again() -> None:
    p = pool(max_queue_size=8)
    for n in range(8):
        one_call(p, f"bot{n}", of_user("bot"))
        p.complete(f"bot{n}", f"bot{n}", 1.0)
    leased = p.lease(6)
    assert leased is not None
    for n in range(4):
        one_call(p, f"ann{n}", of_user("ann"))
    p.leasing.nack(leased[0])
    assert held(p) == {f"ann{n}" for n in range(4)} | {f"bot{n}" for n in range(4, 8)}


def test_a_step_that_never_fits_is_not_asked_for_again() -> None:
    """`full` would have its gateway send it for ever."""
    p = pool(max_bytes=1000, overflow=Overflow.REFUSE)
    p.register(Registration("t", "t"))
    assert call(p, "t", 0, prompt_tokens=500) is SubmitVerdict.TOO_LARGE
    assert p.stats().refused == {"too_large": 1}
