"""The README's one-minute start, block by block, as it stands there. Only ports and the model are the test's own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.gateways import free_port
from tests.rig.vllm_server import VllmServer
from tests.rig.waiting import wait_until

README = Path(__file__).parents[2] / "README.md"
MARK = "STEPWELL_README_TEST"


def blocks() -> list[str]:
    """The code of the section, without the installation, which has been done."""
    section = README.read_text().split("## One minute")[1].split("\n## ")[0]
    install, start, agent, trainer = re.findall(r"```(?:bash|python)\n(.*?)```", section, re.S)
    assert "pip install" in install
    return [start, agent, trainer]


@pytest.fixture
def shell(tiny_model: Path) -> Iterator[dict[str, str]]:
    """An environment whose processes, daemons of Ray's included, can be told from all others and ended."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="sw") as ray_folder:  # a short path: Ray puts sockets below it
        yield {
            **os.environ,
            MARK: mark,
            "MODEL": str(tiny_model),
            "RAY_TMPDIR": ray_folder,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not marked(mark), "the README's processes to end")


def marked(mark: str) -> list[int]:
    def has_mark(process: Path) -> bool:
        try:
            return f"{MARK}={mark}".encode() in (process / "environ").read_bytes()
        except OSError:
            return False

    return [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit() and has_mark(process)]


def test_the_one_minute_start_works(vllm: VllmServer, shell: dict[str, str], tmp_path: Path) -> None:
    def run(command: list[str]) -> str:
        with (tmp_path / "output").open("w+") as output:
            done = subprocess.run(
                command, env=shell, cwd=tmp_path, stdout=output, stderr=output, timeout=120, check=False
            )
            output.seek(0)
            shown = output.read()
        assert done.returncode == 0, shown
        return shown

    ours = {"http://127.0.0.1:8001": vllm.url, "8100": str(free_port())}
    start, agent, trainer = (re.sub("|".join(ours), lambda match: ours[match[0]], block) for block in blocks())
    run(["bash", "-ec", start])
    run([sys.executable, "-c", agent])
    printed = run([sys.executable, "-c", trainer]).splitlines()
    steps = [line for line in printed if re.match(r"[0-9a-f]{32} 0 \d+ \[", line)]
    assert len(steps) == 4, printed
