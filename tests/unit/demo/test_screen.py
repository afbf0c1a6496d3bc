import sys
from dataclasses import fields
from typing import Any

import pytest
from stepwell.demo.live_outcome import LiveStatus

from stepwell.demo.screen import DemoScreen
from stepwell.pool.api.policy import Canary, PolicyDecision
from stepwell.trainers.reporting import UpdateMetrics

ROLLBACK = PolicyDecision(7, "rollback", "guard", "worse than the stable version", 1.0)
CANARY = Canary(7, ("http://127.0.0.1:1",), 0.15, 1.0)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is captured passes for a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)


def metrics(reward: float) -> UpdateMetrics:
    zeros: dict[str, Any] = {field.name: 0 for field in fields(UpdateMetrics)}
    return UpdateMetrics(**(zeros | {"reward": reward}))


def test_without_a_terminal_there_is_a_line_every_ten_updates(capsys: pytest.CaptureFixture[str]) -> None:
    with DemoScreen().rewards(20, is_plotting=False) as show:
        for _ in range(19):
            show(metrics(0.5))

    (line,) = capsys.readouterr().out.splitlines()
    assert "update   10 of 20  reward 0.500" in line


def test_without_a_terminal_the_chart_comes_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with DemoScreen().rewards(1, is_plotting=True) as show:
        show(metrics(1.0))

    assert " 1.0 │█\n" in capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
def test_in_a_terminal_the_chart_is_redrawn(capsys: pytest.CaptureFixture[str]) -> None:
    with DemoScreen().rewards(4, is_plotting=True) as show:
        show(metrics(1.0))

    shown = capsys.readouterr().out
    assert " 1.0 │█" in shown
    assert "update 1 of 4, reward 1.000" in shown


def test_a_line_begins_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    DemoScreen().say("hello")

    assert capsys.readouterr().out == "   0.0 s  hello\n"


def status(update: int, *decisions: PolicyDecision, canary: Canary | None = None) -> LiveStatus:
    return LiveStatus(update=update, updates=8, acceptance=0.5, version=6, canary=canary, decisions=decisions)


def test_without_a_terminal_acceptance_is_a_line_every_few_updates(capsys: pytest.CaptureFixture[str]) -> None:
    with DemoScreen().acceptance(8, is_plotting=True) as show:
        for update in range(1, 8):
            show(status(update, canary=CANARY))

    (line,) = capsys.readouterr().out.splitlines()
    assert "update   4 of 8  acceptance 0.500  version 6, canary 7 for 15% of sessions" in line


def test_a_rollback_is_always_said(capsys: pytest.CaptureFixture[str]) -> None:
    with DemoScreen().acceptance(8, is_plotting=True) as show:
        show(status(1, ROLLBACK))

    assert "version 7 was rolled back by guard: worse than the stable version" in capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
def test_in_a_terminal_the_chart_of_acceptance_is_redrawn(capsys: pytest.CaptureFixture[str]) -> None:
    with DemoScreen().acceptance(8, is_plotting=True) as show:
        show(status(1, ROLLBACK))

    shown = capsys.readouterr().out
    assert "rolled back by guard" in shown
    assert " 0.5 │█" in shown
    assert "acceptance 0.500  version 6" in shown
