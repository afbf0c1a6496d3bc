"""A canary's share of the sessions, and where their calls go."""

import asyncio

import pytest

from stepwell.engines.replica import EngineReplica, EngineState
from stepwell.engines.routing import EngineSelector, RoundRobin, SessionSplit
from stepwell.errors import EngineUnavailable
from stepwell.pool.api.policy import Canary, Serving
from tests.unit.gateway.scripted_engines import make_engine

SESSIONS = [f"session-{i}" for i in range(4000)]


def split(share: float, version: int = 7) -> SessionSplit:
    return SessionSplit(Canary(version, ("http://new",), share, began_at=0.0), [])


class Fleet:
    """One engine with the new weights, two with the old ones."""

    def __init__(self, share: float = 0.1) -> None:
        self.selector = EngineSelector(RoundRobin(), hold_timeout=0.05)
        self.new, self.old, self.old_too = (make_engine(f"http://{name}") for name in ("new", "old", "old-too"))
        for engine in (self.new, self.old, self.old_too):
            engine.state = EngineState.HEALTHY
            self.selector.add(engine)
        self.selector.set_serving(Serving(canary=Canary(7, ("http://new",), share, began_at=0.0)))

    def set_state(self, state: EngineState, *engines: EngineReplica) -> None:
        for engine in engines:
            engine.state = state
        self.selector.note_change()

    async def chosen(self, session: str, *tried: EngineReplica) -> EngineReplica | None:
        return await self.selector.next(session, tried)


IN, OUT = (next(s for s in SESSIONS if split(0.1).is_canary(s) is wanted) for wanted in (True, False))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_share_of_the_sessions_is_the_one_wanted(share: float) -> None:
    assert sum(map(split(share).is_canary, SESSIONS)) / len(SESSIONS) == pytest.approx(share, abs=0.02)


def test_a_larger_share_keeps_the_sessions_and_another_version_gets_others() -> None:
    few = {session for session in SESSIONS if split(0.1).is_canary(session)}
    assert few < {session for session in SESSIONS if split(0.3).is_canary(session)}
    others = {session for session in SESSIONS if split(0.1, version=8).is_canary(session)}
    assert len(few & others) < 0.3 * len(few)


async def test_a_session_stays_on_its_side_and_calls_of_none_are_not_the_canarys() -> None:
    fleet = Fleet()
    assert {await fleet.chosen(IN) for _ in range(6)} == {fleet.new}
    assert {await fleet.chosen(OUT) for _ in range(6)} == {fleet.old, fleet.old_too}
    assert {await fleet.chosen("") for _ in range(6)} == {fleet.old, fleet.old_too}
    assert fleet.selector.split_counts.calls == {"canary": 6, "stable": 12}


async def test_a_promoted_canary_gets_all_and_without_one_all_engines_take_turns() -> None:
    fleet = Fleet(share=1.0)
    assert {await fleet.chosen(session) for session in (IN, OUT, "")} == {fleet.new}
    fleet.selector.set_serving(Serving())
    assert {await fleet.chosen(IN) for _ in range(6)} == {fleet.new, fleet.old, fleet.old_too}


@pytest.mark.parametrize("state", [EngineState.DOWN, EngineState.UNSYNCED])
async def test_the_other_side_answers_if_no_engine_of_a_side_does(state: EngineState) -> None:
    fleet = Fleet()
    fleet.set_state(state, fleet.new)
    assert {await fleet.chosen(IN) for _ in range(4)} == {fleet.old, fleet.old_too}
    fleet.set_state(EngineState.HEALTHY, fleet.new)
    fleet.set_state(state, fleet.old, fleet.old_too)
    assert await fleet.chosen(OUT) is fleet.new
    assert fleet.selector.split_counts.served_by_other == {"canary": 4, "stable": 1}


async def test_a_call_that_its_side_did_not_answer_goes_to_the_other() -> None:
    fleet = Fleet()
    assert await fleet.chosen(IN, fleet.new) in (fleet.old, fleet.old_too)
    assert await fleet.chosen(OUT, fleet.old) is fleet.old_too
    assert await fleet.chosen(OUT, fleet.old, fleet.old_too) is fleet.new
    assert await fleet.chosen(OUT, fleet.old, fleet.old_too, fleet.new) is None


async def test_a_paused_side_is_waited_for() -> None:
    fleet = Fleet()
    fleet.set_state(EngineState.PAUSED, fleet.new)
    waiting = asyncio.create_task(fleet.chosen(IN))
    await asyncio.sleep(0)
    assert not waiting.done()
    fleet.set_state(EngineState.HEALTHY, fleet.new)
    assert await waiting is fleet.new
    fleet.set_state(EngineState.PAUSED, fleet.new)
    with pytest.raises(EngineUnavailable, match="paused engine to resume: http://new"):
        await fleet.chosen(IN)


async def test_a_call_that_waits_when_the_canary_ends_goes_to_any_engine() -> None:
    fleet = Fleet()
    fleet.set_state(EngineState.PAUSED, fleet.new)
    waiting = asyncio.create_task(fleet.chosen(IN))
    await asyncio.sleep(0)
    fleet.selector.set_serving(Serving())
    assert await waiting in (fleet.old, fleet.old_too)


def test_an_engine_whose_version_was_withdrawn_gets_no_calls_from_that_moment() -> None:
    withdrawn: list[int] = []
    engine = make_engine()
    engine._withdrawn = lambda: withdrawn
    engine.state, engine.version, engine.weight_version = EngineState.HEALTHY, 7, "7"
    engine.review()
    assert engine.state is EngineState.HEALTHY
    withdrawn.append(7)
    engine.review()
    assert (engine.state, engine.why) == (EngineState.UNSYNCED, engine._why_unsynced())
    assert "version 7, which was refused or rolled back" in engine.why
