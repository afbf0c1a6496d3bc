"""What `stepwell up` prints while it waits."""

import io

import pytest

from rig.gateways import free_port
from stepwell.commands.processes import StartupScreen, wait_for_model
from stepwell.errors import EngineUnavailable


def test_without_a_terminal_each_change_of_a_wait_is_a_line() -> None:
    out = io.StringIO()
    screen = StartupScreen(out)
    for why in ("loading", "loading", "an engine"):
        screen.wait("the gateway", why)
    screen.wait("the dashboard", "it is starting")
    screen.say("the gateway is ready", instead_of="the gateway")
    screen.wait("the dashboard", "it is starting")
    assert [line[10:] for line in out.getvalue().splitlines()] == [
        "waiting for the gateway: loading",
        "waiting for the gateway: an engine",
        "waiting for the gateway: an engine · the dashboard: it is starting",
        "the gateway is ready",
        "waiting for the dashboard: it is starting",
    ]


def test_without_a_terminal_a_long_wait_is_explained_once_and_then_recalled_ever_more_rarely() -> None:
    out, now = io.StringIO(), [0.0]
    screen = StartupScreen(out, lambda: now[0])
    for second in range(300):
        now[0] = float(second)
        screen.wait("the engine", "Connection refused; start one")
    first, *reminders = [line[10:] for line in out.getvalue().splitlines()]
    assert first == "waiting for the engine: Connection refused; start one"
    assert set(reminders) == {"still waiting for the engine"}
    assert 3 <= len(reminders) <= 8


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_a_wait_is_the_last_line_until_it_ends() -> None:
    out = Terminal()
    screen = StartupScreen(out)
    screen.wait("the gateway", "loading")
    screen.wait("the gateway", "loading")
    screen.say("ready", instead_of="the gateway")
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().endswith("s  ready\n")


def test_an_address_without_an_engine_is_given_up_with_what_to_do() -> None:
    address, told = f"http://127.0.0.1:{free_port()}", set[str]()
    with pytest.raises(
        EngineUnavailable, match=f"no engine answers at {address} after 0.6 s: Connection refused; start"
    ):
        wait_for_model(address, None, told.add, timeout=0.6)
    (why,) = told
    assert why.startswith(
        "Connection refused (tries for 0.6 s); if none runs, start one: VLLM_SERVER_DEV_MODE=1 vllm serve"
    )
