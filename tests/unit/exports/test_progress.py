import io

from stepwell.exports.pool_transfer import TransferProgress

from stepwell.common.command_line import INTERVAL
from tests.unit.exports.stored import stored, turns


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_in_a_terminal_a_line_comes_now_and_then() -> None:
    now, out = [0.0], io.StringIO()
    group = stored(turns("a", 50))
    progress = TransferProgress(total=40, out=out, clock=lambda: now[0])
    for _ in range(4):
        now[0] += INTERVAL / 2
        progress.add([group] * 10, 10 * progress.trajectories * 10_000)
    lines = out.getvalue().splitlines()
    assert lines[0] == "20 of 40 trajectories, 1,000 steps, 1.0 MB in 10.0 s (100 steps/s)"
    assert len(lines) == 2
    assert progress.close() == "40 trajectories, 2,000 steps, 3.0 MB in 20.0 s (100 steps/s)"


def test_in_a_terminal_one_line_is_written_over_and_cleared() -> None:
    now, out = [0.0], Terminal()
    progress = TransferProgress(out=out, clock=lambda: now[0])
    for _ in range(3):
        now[0] += 1.0
        progress.add([stored(turns("a", 2))], 0)
    progress.close()
    assert out.getvalue().count("\n") == 0
    assert out.getvalue().count("\r\x1b[K") == 4
    assert out.getvalue().endswith("\r\x1b[K")
