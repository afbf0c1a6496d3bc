import pytest
from rich.live import Live

from stepwell.demo.live.live_screen import AcceptanceChart, LiveStatus, show_live
from stepwell.demo.screen import DemoScreen
from stepwell.pool.api.policy import Canary, PolicyDecision

ROLLBACK = PolicyDecision(7, "rollback", "guard", "worse than the stable version", 1.0)
CANARY = Canary(7, ("http://127.0.0.1:1",), 0.15, 1.0)


def status(update: int, *decisions: PolicyDecision, canary: Canary | None = None) -> LiveStatus:
    return LiveStatus(update=update, updates=8, acceptance=0.5, version=6, canary=canary, decisions=decisions)


def test_without_a_terminal_there_is_a_line_every_few_updates(capsys: pytest.CaptureFixture[str]) -> None:
    with show_live(DemoScreen(), 8, is_plotting=True) as show:
        for update in range(1, 8):
            show(status(update, canary=CANARY))

    (line,) = capsys.readouterr().out.splitlines()
    assert "update   4 of 8  acceptance 0.500  version 6, canary 7 for 15% of sessions" in line


def test_a_rollback_is_always_said(capsys: pytest.CaptureFixture[str]) -> None:
    with show_live(DemoScreen(), 8, is_plotting=True) as show:
        show(status(1, ROLLBACK))

    assert "version 7 was rolled back by guard: worse than the stable version" in capsys.readouterr().out


def test_in_a_terminal_the_chart_is_redrawn(capsys: pytest.CaptureFixture[str]) -> None:
    with Live(auto_refresh=False) as live:
        AcceptanceChart(live, 8, print)(status(1, ROLLBACK))

    shown = capsys.readouterr().out
    assert "rolled back by guard" in shown
    assert " 0.5 │█" in shown
    assert "acceptance 0.500  version 6" in shown
