"""What a watcher sees."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import TextColumn

from stepwell.envs.loop.progress import EVERY, EnvProgress, ProgressBars, ProgressLines, showing

AT_WORK = EnvProgress("sums", done=2, total=10, delivered=5, running=3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_how_far_it_is_and_what_was_lost_by_cause() -> None:
    lines: list[str] = []
    ProgressLines(lines.append).update(replace(AT_WORK, queue=4, dropped={"too long": 1, "equal scores": 2}))
    assert lines == [
        "sums: 2/10, delivered 5, under way 3, queue 4, dropped 2 (equal scores), 1 (too long)",
    ]


def test_lines_come_at_intervals_and_whenever_work_is_held_up_or_goes_on() -> None:
    lines: list[str] = []
    clock = Clock()
    show = ProgressLines(lines.append, clock)
    for done in range(100):
        show.update(replace(AT_WORK, done=done))
    assert len(lines) == 1
    show.update(replace(AT_WORK, idle="the trainer is behind"))
    assert lines[1] == "sums: 2/10, delivered 5, under way 3, paused: the trainer is behind"
    show.update(AT_WORK)
    show.update(AT_WORK)
    assert len(lines) == 3
    clock.now += EVERY
    show.update(AT_WORK)
    assert len(lines) == 4


def test_the_last_line_says_how_it_ended() -> None:
    lines: list[str] = []
    show = ProgressLines(lines.append)
    show.update(AT_WORK)
    show.update(replace(AT_WORK, done=10, running=0))
    show.close()
    show.close()
    assert lines[-1] == "sums: 10/10, delivered 5, under way 0"
    assert len(lines) == 2


def test_where_there_is_no_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with showing() as show:
        show(AT_WORK)
    assert capsys.readouterr().err == "sums: 2/10, delivered 5, under way 3\n"


def test_in_a_terminal_there_are_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with showing() as show:
        show(replace(AT_WORK, name="[red]sums", is_evaluating=True))
    assert "[red]sums" in terminal.getvalue()
    assert "delivered 5, under way 3, evaluating" in terminal.getvalue()
    assert "2/10" in terminal.getvalue()


def test_bars_know_no_end_where_there_is_none() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with RichProgress(TextColumn("{task.fields[words]}"), console=console) as bars:
        ProgressBars(bars).update(replace(AT_WORK, total=-1))
        assert bars.tasks[0].total is None
