"""The README's one-minute start, block by block, as it stands there. Only the engine's address and the ports are the
test's own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.gateways import free_port
from tests.rig.shells import Shell, fresh_shell
from tests.rig.vllm_server import VllmServer
from tests.rig.waiting import wait_until

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    """The code of the section, without the installation, which has been done."""
    section = README.read_text().split("## One minute")[1].split("\n## ")[0]
    install, start, agent, trainer, end = re.findall(r"```(?:bash|python)\n(.*?)```", section, re.S)
    assert "pip install" in install
    return [start, agent, trainer, end]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    dashboard = str(free_port())  # the README has no word of it, and 8200 may be taken here
    with fresh_shell(tmp_path, STEPWELL_UP_DASHBOARD_PORT=dashboard) as shell:
        yield shell


def test_the_one_minute_start_works(vllm: VllmServer, shell: Shell) -> None:
    ours = {"http://127.0.0.1:8001": vllm.url, "http://127.0.0.1:8100": f"http://127.0.0.1:{free_port()}"}
    shell.env["STEPWELL_UP_PORT"] = ours["http://127.0.0.1:8100"].rpartition(":")[2]
    start, agent, trainer, end = (re.sub("|".join(ours), lambda match: ours[match[0]], block) for block in blocks())
    shell.run("bash", "-ec", start)
    for name, program in (("agent.py", agent), ("trainer.py", trainer)):
        (shell.folder / name).write_text(program)
    shell.run("bash", "-ec", ". .stepwell/env; python agent.py")
    printed = shell.run("bash", "-ec", ". .stepwell/env; python trainer.py").splitlines()
    steps = [line for line in printed if re.match(r"[0-9a-f]{32} 0 \d+ \[", line)]
    assert len(steps) == 4, printed
    assert "4 steps submitted" in shell.run("bash", "-ec", end)
    wait_until(lambda: not shell.pids(), "every process to be gone")
