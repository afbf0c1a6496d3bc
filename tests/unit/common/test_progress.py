import asyncio
import io

import pytest

from stepwell.common.command_line import CLEAR, ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_cancelled_line_leaves_its_last_text() -> None:
    out, shown, enough = Terminal(), 0, asyncio.Event()

    def text() -> str:
        nonlocal shown
        shown += 1
        if shown == 3:
            enough.set()
        return f"number {shown}"

    running = asyncio.create_task(ProgressLine(text, out, interval=0.0).run())
    await enough.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert out.getvalue().startswith(f"{CLEAR}number 1{CLEAR}number 2{CLEAR}number 3")
    assert out.getvalue().endswith(f"{CLEAR}number {shown}\n")
    assert out.getvalue().count("\n") == 1


def test_a_line_in_a_terminal_is_cut_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "11")
    now, out = [0.0], Terminal()
    line = ProgressLine(lambda: "0123456789abcdef", out, clock=lambda: now[0])
    line.update()
    assert out.getvalue() == ""
    now[0] = 1.0
    line.update()
    assert out.getvalue() == f"{CLEAR}0123456789"
