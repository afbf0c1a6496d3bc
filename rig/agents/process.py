"""How an agent's process is run: the environment it lives in, what it is told, and how long it may take."""

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stepwell.agents.cli_agents import CommandLineHarness, OpenClaw, Opencode
from stepwell.common.processes import run_command

CHECKOUT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there: opencode looks for plugins on the internet, which no setting of its own forbids."""


@cache
def environment() -> Path:
    """The folder of the agents' environment, which is built first where it is missing."""
    script = CHECKOUT / "scripts" / "agent_envs.py"
    built = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.splitlines()[-1])


def installed(harness: type[CommandLineHarness]) -> dict[str, Any]:
    """The arguments with which a harness of the agents' environment is run."""
    program = environment() / "npm" / "node_modules" / ".bin" / harness.program
    own: dict[type[CommandLineHarness], dict[str, str]] = {
        OpenClaw: {"NODE_COMPILE_CACHE": str(environment() / "compile-cache")},
        Opencode: {"HTTPS_PROXY": NOWHERE},
    }
    return {"program": str(program), "env": {"PATH": _path(), **own.get(harness, {})}}


def output_of(program: Path, *, folder: Path, home: Path, settings: Mapping[str, str]) -> str:
    """What a Python program writes on stdout, run in `folder` with a HOME of its own and none of this process's
    settings."""
    env = {"PATH": _path(), "HOME": str(home), **settings}
    return in_time(run_command([str(environment() / "bin" / "python"), str(program)], env=env, stdin=b"", cwd=folder))


def in_time(answer: Coroutine[Any, Any, str]) -> str:
    return asyncio.run(asyncio.wait_for(answer, TIMEOUT_S))


def _path() -> str:
    return f"{environment() / 'bin'}:/usr/local/bin:/usr/bin:/bin"
