"""The demo with a dashboard beside it, in one process tree: both know the demo's Ray, which nobody else may join.

    python -m rig.watched_demo PORT FOLDER UPDATES

Interrupted (SIGINT), it ends with everything that it started.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rig.vllm_server import vllm_python
from rig.waiting import answers, wait_until
from stepwell.demo.agent_process import AgentProcess
from stepwell.demo.run import NAMESPACE, POOL, Demo
from stepwell.demo.screen import DemoScreen
from stepwell.trainers.trainer import AsyncTrainer


class WatchedDemo(Demo):
    def __init__(self, out: Path, updates: int, port: int) -> None:
        python = str(vllm_python())
        super().__init__(DemoScreen(), task="rev", seed=1, updates=updates, out=out, plot=False, vllm_python=python)
        self._port = port

    def _start(self, stack: ExitStack) -> tuple[AsyncTrainer, AgentProcess]:
        started = super()._start(stack)
        import ray  # not before: it reads the demo's settings when it is imported

        flags = {
            "port": self._port,
            "data-pool-name": POOL,
            "ray-address": ray.get_runtime_context().gcs_address,
            "ray-namespace": NAMESPACE,
        }
        stack.enter_context(demo_dashboard(self._out / "model", self._out / "dashboard.log", flags))
        return started


@contextmanager
def demo_dashboard(model: Path, log: Path, flags: Mapping[str, object]) -> Iterator[None]:
    """`stepwell dashboard`, with the gateway of the demo's agents that use this model."""
    flags = {**flags, "gateways": gateway_of(model), "tokenizer-path": model}
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with log.open("wb") as output:
        command = [sys.executable, "-m", "stepwell", "dashboard", *given]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    try:
        url = f"http://127.0.0.1:{flags['port']}/health"
        wait_until(lambda: process.poll() is not None or answers(url), "the dashboard")
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait()


def gateway_of(model: Path) -> str:
    """It is a child of the agents' process: its port is on its command line."""
    for folder in Path("/proc").iterdir():
        words = _words(folder) if folder.name.isdecimal() else []
        if "stepwell.gateway" in words and str(model) in words and "--port" in words:
            return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    raise AssertionError("the demo has no gateway")


def _words(folder: Path) -> list[str]:
    try:
        return (folder / "cmdline").read_text().split("\0")
    except OSError:  # it has just ended
        return []


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    port, folder, updates = sys.argv[1:]
    try:
        WatchedDemo(Path(folder), int(updates), int(port)).run()
    except KeyboardInterrupt:
        sys.exit(130)
