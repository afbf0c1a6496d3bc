"""examples/async_training as its README says, with real vLLM: a few updates; in the night, enough to learn the task."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

from rig.gateways import free_port
from rig.shells import Shell, fresh_shell
from rig.vllm_server import vllm_python
from stepwell.demo.engine import start_engine
from tests.examples.folders import EXAMPLES, addresses_replaced, shell_block

ENGINE = "http://127.0.0.1:8001"
"""As the README names it."""
LINE = re.compile(
    r"update (\d+): reward ([\d.]+), ([\d.]+) versions behind, (\d+) groups made, vLLM has version (\d+)", re.MULTILINE
)
UPDATES = 120


class Update(NamedTuple):
    number: int
    reward: float
    behind: float
    groups: int
    version: int


@contextmanager
def at_the_example(folder: Path) -> Iterator[Shell]:
    (folder / "examples").symlink_to(EXAMPLES)
    ports = {"STEPWELL_UP_PORT": str(free_port()), "STEPWELL_UP_DASHBOARD_PORT": str(free_port())}
    with fresh_shell(folder, **ports) as shell:
        yield shell


def train(shell: Shell, *, steps: str = "", updates: str = "") -> list[Update]:
    """Types what the README says; vLLM is started with the flags of a CPU."""
    make, up, learn = (shell_block("async_training", mark) for mark in ("make_model.py", "stepwell up", "train.py"))
    shell.run("bash", "-ec", f"{make.rstrip()} {steps}", timeout=900)
    model = shell.folder / "model"
    with start_engine(model, python=vllm_python(), log=shell.folder / "vllm.log") as engine:
        engine.wait()
        try:
            command = addresses_replaced(up, {ENGINE: engine.url}) + f"{learn.rstrip()} {updates}"
            printed = shell.run("bash", "-ec", command, timeout=2400)
        finally:
            shell.run("stepwell", "down")
    found = [Update(int(n), float(r), float(b), int(g), int(v)) for n, r, b, g, v in LINE.findall(printed)]
    assert found, printed
    assert (shell.folder / "trained" / "model.safetensors").exists()
    assert [update.number for update in found] == list(range(1, len(found) + 1)), printed
    return found


def check_asynchrony(found: list[Update]) -> None:
    """Rollouts went on during the updates, and every update reached vLLM."""
    assert [later.version - earlier.version for earlier, later in pairwise(found)] == [1] * (len(found) - 1)
    assert max(update.behind for update in found) > 0.0, "some of what is trained was sampled before the last update"
    assert found[-1].groups > found[0].groups


def test_rollouts_and_training_go_on_together(tmp_path: Path) -> None:
    with at_the_example(tmp_path) as shell:
        found = train(shell, steps="150", updates="4")
    assert len(found) == 4
    check_asynchrony(found)


@pytest.mark.nightly
def test_the_tiny_model_learns_to_reverse_words(tmp_path: Path) -> None:
    with at_the_example(tmp_path) as shell:
        found = train(shell)
    assert len(found) == UPDATES
    check_asynchrony(found)
    assert fmean(update.reward for update in found[:5]) < 0.4
    assert fmean(update.reward for update in found[-10:]) > 0.8
