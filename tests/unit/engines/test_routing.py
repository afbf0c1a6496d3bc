from collections import Counter

import pytest

from stepwell.engines.replica import EngineReplica
from stepwell.engines.routing import ROUTINGS, LeastBusy, RoundRobin, Sticky, routing_named
from stepwell.errors import BadRequest
from tests.unit.gateway.scripted_engines import make_engine


def replica(address: str, in_flight: int = 0) -> EngineReplica:
    engine = make_engine(address)
    engine.in_flight = in_flight
    return engine


FOUR = [replica(f"http://engine-{i}:8000") for i in range(4)]
TRAJECTORIES = [f"trajectory-{i}" for i in range(4000)]


def chosen(routing: RoundRobin, engines: list[EngineReplica], stickies: list[str]) -> list[str]:
    return [routing.choose(engines, sticky).address for sticky in stickies]


def test_turns_go_round_whatever_comes_and_goes() -> None:
    turns = RoundRobin()
    a, b, c = FOUR[:3]
    assert [turns.choose([a, b, c], "") for _ in range(4)] == [a, b, c, a]
    assert [turns.choose([a, b], "") for _ in range(3)] == [b, a, b]
    assert [turns.choose([c], ""), turns.choose([a, b, c], "")] == [c, b]


def test_the_least_busy_comes_first_and_equals_take_turns() -> None:
    busy, idle, idle_too = replica("a", 3), replica("b", 1), replica("c", 1)
    routing = LeastBusy()
    assert [routing.choose([busy, idle, idle_too], "") for _ in range(4)] == [idle, idle_too, idle, idle_too]


def test_a_trajectory_sticks_to_its_engine_whatever_their_order() -> None:
    first, again = chosen(Sticky(), FOUR, TRAJECTORIES), chosen(Sticky(), FOUR[::-1], TRAJECTORIES)
    assert first == again
    counts = Counter(first)
    assert len(counts) == 4
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_only_the_trajectories_of_a_lost_engine_move_and_they_spread() -> None:
    before, after = chosen(Sticky(), FOUR, TRAJECTORIES), chosen(Sticky(), FOUR[1:], TRAJECTORIES)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(moved) == before.count(FOUR[0].address)
    assert len(set(moved)) == 3


def test_calls_of_no_trajectory_take_turns() -> None:
    assert chosen(Sticky(), FOUR, [""] * 4) == [engine.address for engine in FOUR]


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings_are_known_by_name(name: str) -> None:
    assert routing_named(name).choose(FOUR[:1], "t") is FOUR[0]


def test_an_unknown_routing_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="'random'.*round_robin, least_busy, sticky"):
        routing_named("random")
