from dataclasses import fields
from typing import Any

import pytest
from rich.live import Live

from stepwell.demo.screen import DemoScreen, LiveChart
from stepwell.trainers.reporting import UpdateMetrics


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


def test_in_a_terminal_the_chart_is_redrawn(capsys: pytest.CaptureFixture[str]) -> None:
    with Live(auto_refresh=False) as live:
        LiveChart(live, 4)(metrics(1.0))

    shown = capsys.readouterr().out
    assert " 1.0 │█" in shown
    assert "update 1 of 4, reward 1.000" in shown


def test_a_line_begins_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    DemoScreen().say("hello")

    assert capsys.readouterr().out == "   0.0 s  hello\n"
