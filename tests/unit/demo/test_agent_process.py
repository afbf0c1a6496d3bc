from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.demo.agent_process import AgentProcess, Orders, start_agents
from stepwell.errors import NotReady

ORDERS = Orders(
    task="rev",
    seed=7,
    engine="http://127.0.0.1:1",
    tokenizer="/no/such/model",
    data_pool_name="pool",
    ray_address="127.0.0.1:2",
    ray_namespace="demo",
)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[AgentProcess]:
    with start_agents(ORDERS, log=tmp_path / "agents.log", module="tests.unit.demo.scripted_agents") as agents:
        agents.wait()
        yield agents


def test_agents_follow_orders_and_answer(agents: AgentProcess) -> None:
    agents.train()

    assert agents.evaluate() == 7.0


def test_the_error_of_a_dead_agent_process_has_its_last_lines(agents: AgentProcess) -> None:
    with pytest.raises(NotReady, match="(?s)ended.*the gateway is on fire"):
        agents.stop()
    with pytest.raises(NotReady, match="ended"):
        agents.evaluate()


def test_orders_are_read_back_unchanged() -> None:
    assert Orders.from_json(ORDERS.to_json()) == ORDERS
