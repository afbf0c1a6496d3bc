"""How a program is run in another trainer's environment: with this checkout on its path, in the tests' Ray.

Examples are run unchanged. They find the pool where `stepwell up` has it: DEFAULT, in the cluster of RAY_ADDRESS.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = CHECKOUT / "examples"
DEFAULT = "default"
"""The namespace of `stepwell up`."""
SETTINGS = {
    "PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


@cache
def trainer_python(name: str) -> Path:
    """The interpreter of that trainer's environment, which is built first where it is missing."""
    script = CHECKOUT / "scripts" / "trainer_envs.py"
    built = subprocess.run([sys.executable, script, name], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.splitlines()[-1])


def start_program(trainer: str, program: str, asked: dict[str, Any], *, log: Path) -> "subprocess.Popen[str]":
    """`asked` is its one argument, as JSON. What it writes is in `log`; its answer is the last JSON object
    there, which lines of libraries may follow."""
    return _start([str(trainer_python(trainer)), str(PROGRAMS / program), json.dumps(asked)], log, SETTINGS)


def start_command(
    trainer: str, command: Sequence[object], *, address: str, log: Path, **settings: str
) -> "subprocess.Popen[str]":
    """A command as users type it, in the folder of its log: `python` is that trainer's, and `address` that of Ray."""
    path = f"{trainer_python(trainer).parent}{os.pathsep}{os.environ['PATH']}"
    return _start(list(map(str, command)), log, {**SETTINGS, "PATH": path, "RAY_ADDRESS": address, **settings})


def _start(command: Sequence[str], log: Path, settings: Mapping[str, str]) -> "subprocess.Popen[str]":
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            cwd=log.parent,
            env={**os.environ, **settings},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            text=True,
        )


def answer_of(process: "subprocess.Popen[str]", log: Path, *, timeout: float) -> Any:
    """What the program answered, once it is over; it is ended if that takes too long."""
    try:
        process.wait(timeout)
    finally:
        process.kill()
        process.wait()
    written = log.read_text()
    assert process.returncode == 0, written[-8000:]
    return json.loads([line for line in written.splitlines() if line.startswith('{"')][-1])


def lives_on(process: "subprocess.Popen[str]", seconds: float) -> bool:
    """Whether it does, when they are over; else it ended before."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False
