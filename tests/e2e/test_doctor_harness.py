"""`stepwell doctor --harness` with a real harness, unmodified, whose model a fake engine plays."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rig.agents import TaskEngine, installed
from rig.fake_engine import ToolCall
from rig.threads import in_thread
from stepwell.agents.cli_agents import ClaudeCode
from stepwell.doctor.harness_trial import TASK


def test_an_installed_harness_connects_and_its_turns_are_one_row(tmp_path: Path) -> None:
    engine = TaskEngine()
    engine.prompt, engine.aside = TASK, None
    engine.calls = (ToolCall("Bash", {"command": "cat note.txt", "description": "Read the note"}),)
    claude = installed(ClaudeCode)
    path = f"{Path(claude['program']).parent}:{claude['env']['PATH']}"
    with in_thread(engine):
        command = [sys.executable, "-m", "stepwell", "doctor", "--engine", engine.url, "--harness", "claude-code"]
        env = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            [*command, "--json"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )

    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["harness"]["mark"] == "ok"
    assert re.fullmatch(rf"{re.escape(claude['program'])}, [\d.]+ \(Claude Code\)", checks["harness"]["what"])
    assert checks["harness calls"]["what"] == "it made 2 calls: 2 to /v1/messages"
    assert (checks["harness turns"]["mark"], checks["harness turns"]["what"]) == (
        "exact",
        "2 turns recorded: one row to train on",
    )
    assert not list(tmp_path.glob("stepwell-harness-*")), "its folders are deleted"
