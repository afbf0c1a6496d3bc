"""The demo's agents, seen from the process that trains: episodes.py as a child, told what to do."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepwell.common.processes import last_lines
from stepwell.demo.orders import Orders
from stepwell.errors import NotReady

STOP_TIMEOUT = 45.0
"""Seconds: a gateway takes up to 40 for its last steps."""
SHOWN = 10
"""Lines of the log that an error ends with."""


class Agents:
    """Alive as long as the `start_agents` it came from is open."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log

    def wait(self) -> None:
        """Until the gateway is ready."""
        self._answer()

    def evaluate(self) -> float:
        """The mean reward on held-out samples, under the weights that the engine has now."""
        return float(self.tell("evaluate"))

    def train(self) -> None:
        """Begin to make rollouts."""
        self.tell("train")

    def stop(self) -> None:
        self.tell("stop")

    def tell(self, order: str) -> float:
        """The answer comes once it is done."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{order}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NotReady(f"the agents' process ended; {last_lines(self._log, SHOWN)}")
        return float(line)


@contextmanager
def start_agents(orders: Orders, *, log: Path, module: str = "stepwell.demo.episodes") -> Iterator[Agents]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", module, orders.to_json()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes stdin
        )
    try:
        yield Agents(process, log)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        process.communicate(timeout=STOP_TIMEOUT)  # the end of its stdin ends it
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
