"""A new user's path: docs/start.md's commands, as they stand there, on a clean environment.

Only the engine's address and the ports are the test's own. What is pasted into Python is what `stepwell up` printed.
"""

import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rig.gateways import free_port
from rig.shells import Shell, fresh_shell
from rig.vllm_server import VllmServer
from rig.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]
LONGEST = 300.0
"""Seconds of processors from the first command to the step on the screen. Other tests run beside this one, so seconds
of a clock would say little."""
PATIENCE = 1_200.0


def commands() -> list[str]:
    section = (CHECKOUT / "docs/start.md").read_text().split("## Five commands")[1].split("\n## ")[0]
    return re.findall(r"```bash\n(.*?)\n```", section, re.S)


@pytest.fixture
def clean(tmp_path: Path) -> Iterator[Shell]:
    """An environment with nothing installed; only pip's cache is shared."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True)
    work = tmp_path / "work"
    work.mkdir()
    pip = {"PIP_CACHE_DIR": cache.stdout.strip(), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "1"}
    with fresh_shell(work, **pip, PATH=f"{venv / 'bin'}:/usr/bin:/bin") as shell:
        yield shell


def processor_seconds() -> float:
    """Of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.nightly
def test_a_new_user_sees_the_first_step_within_five_commands_and_five_minutes(
    clean: Shell, vllm: VllmServer, record_property: Callable[[str, object], None]
) -> None:
    install, up, python, status, down = commands()
    ports = f" --port {free_port()} --dashboard-port {free_port()}"
    began, used = time.monotonic(), processor_seconds()

    clean.run("bash", "-ec", install.replace("pip install .", f"pip install {CHECKOUT}"), timeout=PATIENCE)
    installed = time.monotonic() - began
    printed = clean.run("bash", "-ec", up.replace("http://127.0.0.1:8001", vllm.url) + ports)
    snippet = printed[printed.index("import stepwell") :].split("\n\n")[0]
    clean.run(python, "-c", snippet)
    shown = clean.run("bash", "-ec", status)
    seconds = time.monotonic() - began

    record_property("seconds", seconds)
    sys.stdout.write(f"a new user's first step: {seconds:.0f} s, {installed:.0f} s of it installing\n")
    assert "1 step submitted" in shown, shown
    assert re.search(r"^ +train +1 +1 +1 +1 +\d+ ", shown, re.M), shown
    assert re.search(r"^lost +nothing$", shown, re.M), shown
    assert processor_seconds() - used < LONGEST
    clean.run("bash", "-ec", down)
    wait_until(lambda: not clean.pids(), "every process to be gone")
