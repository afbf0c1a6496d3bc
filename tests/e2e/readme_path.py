"""The README's five-minute start, block by block, as it stands there. Only the engine's address and the ports are the
test's own."""

import re
from pathlib import Path

from tests.rig.gateways import free_port
from tests.rig.shells import Shell
from tests.rig.waiting import wait_until

README = Path(__file__).parents[2] / "README.md"
ENGINE, GATEWAY = "http://127.0.0.1:8001", "http://127.0.0.1:8100"
"""As the README names them."""


def installation() -> str:
    return _blocks()[0]


def follow(shell: Shell, engine: str) -> None:
    """Start, one agent with four attempts, a trainer, the end; all steps arrive, and no process stays."""
    ours = {ENGINE: engine, GATEWAY: f"http://127.0.0.1:{free_port()}"}
    shell.env["STEPWELL_UP_PORT"] = ours[GATEWAY].rpartition(":")[2]
    shell.env["STEPWELL_UP_DASHBOARD_PORT"] = str(free_port())  # the README has no word of it, and 8200 may be taken
    blocks = (re.sub("|".join(ours), lambda match: ours[match[0]], block) for block in _blocks()[1:])
    start, agent, trainer, end = blocks
    shell.run("bash", "-ec", start)
    for name, program in (("agent.py", agent), ("trainer.py", trainer)):
        (shell.folder / name).write_text(program)
    shell.run("bash", "-ec", ". .stepwell/env; python agent.py")
    printed = shell.run("bash", "-ec", ". .stepwell/env; python trainer.py").splitlines()
    steps = [line for line in printed if re.match(r"[0-9a-f]{32} 0 \d+ \[", line)]
    assert len(steps) == 4, printed
    assert "4 steps submitted" in shell.run("bash", "-ec", end)
    wait_until(lambda: not shell.pids(), "every process to be gone")


def _blocks() -> list[str]:
    """Installation, start, agent, trainer, end."""
    section = README.read_text().split("## Five-minute start")[1].split("\n## ")[0]
    found: list[str] = re.findall(r"```(?:bash|python)\n(.*?)```", section, re.S)
    assert len(found) == 5
    assert "pip install" in found[0]
    return found
