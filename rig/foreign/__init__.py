"""Environments of other frameworks, as published: a taskset for verifiers, a task and an agent for Harbor."""

import subprocess
import sys
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
HARBOR_TASK = Path(__file__).parent / "harbor_task"


@cache
def foreign_env(name: str) -> Path:
    """The Python of a framework, or the folder of packages; built first if it is missing."""
    script = CHECKOUT / "scripts" / "foreign_envs.py"
    built = subprocess.run([sys.executable, script, name], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.splitlines()[-1])
