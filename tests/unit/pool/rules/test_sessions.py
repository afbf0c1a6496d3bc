"""Sessions: which trajectory a session is in, and when it ends by itself."""

import pytest

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import EndResult, Registration
from stepwell.pool.api.sessions import SESSION, SessionCall, SessionPlace, session_prompt_uid

PROMPT = session_prompt_uid("s")


@pytest.fixture
def pool() -> EasyPool:
    pool = EasyPool(Limits(session_idle=10.0))
    pool.advance(100.0)
    return pool


def call(new_uid: str = "next", **more: object) -> SessionCall:
    return SessionCall("s", new_uid, **more)  # type: ignore[arg-type]


def end_idle(pool: EasyPool) -> list[EndResult]:
    return [pool.sessions.end_idle(trajectory) for trajectory in pool.sessions.idle()]


def step(pool: EasyPool, uid: str = "s", step_uid: str = "") -> None:
    pool.submit([make_step(uid, PROMPT, uid=step_uid)])


def test_the_first_call_opens_the_trajectory_that_names_the_session(pool: EasyPool) -> None:
    assert pool.sessions.place(call(user="ann", metadata={"task": 1})) == SessionPlace("s", "train")
    assert pool.state.trajectories["s"].metadata == {"task": 1, SESSION: {"id": "s", "user": "ann"}}
    assert pool.sessions.place(call("other")) == SessionPlace("s", "train")
    assert pool.stats().sessions.open == 1


def test_an_idle_session_is_completed_and_says_so(pool: EasyPool) -> None:
    pool.sessions.place(call())
    step(pool)
    pool.advance(109.9)
    assert not pool.sessions.idle()
    pool.advance(110.0)
    assert end_idle(pool) == [EndResult.COMPLETED]
    assert pool.state.trajectories["s"].metadata["ended_by"] == "idle"
    assert pool.stats().sessions.ended_idle == 1
    assert pool.stats().sessions.open == 0
    (snapshot,) = pool.view.page(0, 10).snapshots
    assert (snapshot.state, snapshot.note) == ("ready", "ended by idle")


def test_each_step_and_each_question_begins_the_idle_time_anew(pool: EasyPool) -> None:
    pool.sessions.place(call())
    pool.advance(109.0)
    step(pool)
    pool.advance(118.0)
    assert not pool.sessions.idle()
    pool.sessions.place(call())
    pool.advance(127.0)
    assert not pool.sessions.idle()
    pool.advance(128.0)
    assert len(pool.sessions.idle()) == 1


def test_a_rollout_with_a_declared_end_is_never_idle(pool: EasyPool) -> None:
    pool.register(Registration("t", "p", metadata={SESSION: {"id": "t"}}))
    pool.advance(10_000.0)
    assert not pool.sessions.idle()


def test_without_a_limit_no_session_ends_by_itself() -> None:
    pool = EasyPool(Limits())
    pool.sessions.place(call())
    pool.advance(10_000.0)
    assert not pool.sessions.idle()


def test_a_later_call_goes_on_in_a_successor_of_the_same_channel_and_user(pool: EasyPool) -> None:
    pool.sessions.place(call(user="ann", channel="live", metadata={"task": 1}))
    step(pool)
    pool.advance(110.0)
    end_idle(pool)
    assert pool.sessions.place(call("two")) == SessionPlace("two", "live")
    expected = {"task": 1, SESSION: {"id": "s", "user": "ann", "predecessor": "s"}}
    assert pool.state.trajectories["two"].metadata == expected
    step(pool, "two", "another")
    pool.advance(120.0)
    end_idle(pool)
    assert pool.sessions.place(call("three")) == SessionPlace("three", "live")
    session = pool.state.trajectories["three"].metadata[SESSION]
    assert session == {"id": "s", "user": "ann", "predecessor": "two"}


def test_a_session_that_is_forgotten_has_the_predecessor_that_the_gateway_knows(pool: EasyPool) -> None:
    assert pool.sessions.place(call("new", after="old")) == SessionPlace("new", "train")
    assert pool.state.trajectories["new"].metadata[SESSION] == {"id": "s", "user": "", "predecessor": "old"}


def test_an_idle_session_without_a_recorded_call_is_dropped(pool: EasyPool) -> None:
    pool.sessions.place(call())
    pool.advance(110.0)
    assert end_idle(pool) == [EndResult.EMPTY]
    assert pool.sessions.place(call("two")) == SessionPlace("two", "train")


def test_the_last_trajectory_is_told_without_opening_another(pool: EasyPool) -> None:
    asks = call("", opens=False)
    assert pool.sessions.place(asks) is None
    pool.sessions.place(call())
    step(pool)
    pool.advance(110.0)
    end_idle(pool)
    assert pool.sessions.place(asks) == SessionPlace("s", "train")
    assert pool.stats().sessions.open == 0


def test_sessions_are_groups_of_one_whatever_the_pool_says(pool: EasyPool) -> None:
    pool = EasyPool(Limits(session_idle=10.0, group_size=4))
    pool.sessions.place(call())
    step(pool)
    pool.advance(10.0)
    end_idle(pool)
    taken = pool.take(1)
    assert taken is not None
    assert [found.trajectory_uid for found in taken[0]] == ["s"]
