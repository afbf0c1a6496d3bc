"""The simulation of benchmarks.flush_storm: it counts what the shard's protocol sends, and finds the storm."""

import pytest

from benchmarks.flush_storm import GATEWAYS, NEVER, Announced, Costs, Polled, Simulation, simulate
from stepwell.pool.shard.gateway_roster import GAP

COSTS = Costs(message=0.001, operation=0.0001)


def started(protocol: type[Simulation], agents: int) -> Simulation:
    simulation = protocol(COSTS, agents)
    simulation.start()
    simulation.run(10.0)
    return simulation


def test_an_idle_shard_gets_each_gateways_poll_once_a_second() -> None:
    simulation = started(Polled, agents=0)
    before = simulation.messages
    simulation.run(100.0)
    assert simulation.messages - before == pytest.approx(GATEWAYS * 100, rel=0.05)


@pytest.mark.parametrize(("pause", "storms"), [(GAP - 1.2, False), (GAP + 0.5, True)])
def test_after_a_pause_longer_than_the_gap_all_gateways_are_asked_for_each_rollout(pause: float, storms: bool) -> None:
    simulation = started(Polled, agents=600)
    before = simulation.messages
    simulation.run(20.0)
    usual = simulation.messages - before
    simulation.pause(pause)
    simulation.run(20.0)
    assert (simulation.messages - before - usual > 1.5 * usual) == storms


def test_where_holders_are_announced_a_pause_costs_nothing_but_itself() -> None:
    figures = simulate(Announced, COSTS)
    assert figures["idle_messages_per_s"] < 5
    assert figures["recovery_s"] < 10
    assert figures["answers_503"] == 0
    assert figures["messages_per_s_after"] == pytest.approx(figures["messages_per_s"], rel=0.2)
    assert figures["completions"] > 300


def test_completions_that_are_not_answered_are_no_recovery() -> None:
    simulation = started(Announced, agents=200)
    simulation.pause(1_000.0)
    simulation.run(60.0)
    assert simulation.recovery(paused_until=simulation.now) == NEVER
