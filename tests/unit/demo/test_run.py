import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.waiting import wait_until
from stepwell.demo.run import DemoResult

WITHIN = 60.0
"""Seconds for a process to start or to end on a busy machine."""


def test_a_result_is_written_as_json_and_as_one_line(tmp_path: Path) -> None:
    result = DemoResult(
        task="rev", seed=0, updates=150, start=0.14, end=0.96, samples_per_second=110.0, seconds=240.0, largest_gap=2e-6
    )
    result.write(tmp_path / "outcome.json")

    assert json.loads((tmp_path / "outcome.json").read_text())["end"] == 0.96
    assert "0.140 before, 0.960 after 150 updates" in result.text()
    assert "\n" not in result.text()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    line = (sys.executable, "-m", "tests.unit.demo.terminated_demo", str(tmp_path))
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_demo_that_is_terminated_leaves_no_engine_running(demo: "subprocess.Popen[str]") -> None:
    assert demo.stdout is not None
    engine = int(demo.stdout.readline())

    demo.send_signal(signal.SIGTERM)
    demo.send_signal(signal.SIGTERM)  # some supervisors repeat it
    assert demo.stdout.readline().endswith("stopped\n")
    assert demo.wait(WITHIN) == 128 + signal.SIGTERM
    wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the end of the engine", WITHIN)
