"""How an agent's process is run: the environment it lives in, what it is told, and how long it may take."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
TIMEOUT_S = 60.0
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Access:
    """All that an agent is told of the gateway."""

    base_url: str
    api_key: str


@cache
def environment() -> Path:
    """The folder of the agents' environment, which is built first where it is missing."""
    script = CHECKOUT / "scripts" / "agent_envs.py"
    built = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.splitlines()[-1])


def output_of(*command: str | Path, folder: Path, home: Path, settings: Mapping[str, str]) -> str:
    """What the command writes on stdout, run in `folder` with a HOME of its own and none of this process's settings."""
    home.mkdir(exist_ok=True)
    path = f"{environment() / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": path, "HOME": str(home), **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
