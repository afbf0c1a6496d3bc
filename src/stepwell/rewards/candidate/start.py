"""`python -I start.py PROGRAM LIMITS CHANNEL`: runs a program of this folder without the rest of Stepwell.

The program prepares itself first: its user, its limits, its standard streams.
"""

import ctypes
import json
import os
import resource
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGES = ("stepwell", "stepwell.rewards", "stepwell.rewards.candidate")
READY = b"ready\n"
LONGEST_TEXT = 300
PR_SET_DUMPABLE = 4


def prepare() -> tuple[int, int]:
    """Prepares a program that was started with its limits as JSON and the number of its channel; returns the
    descriptors of the channel and of the old stdout.

    The three standard streams lead nowhere from now on.
    """
    limits: dict[str, Any] = json.loads(sys.argv[1])
    for name, limit in limits["rlimits"].items():
        _limit(getattr(resource, name), limit)
    user = limits["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc/self belongs to root
    answers, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.write(answers, READY)
    return int(sys.argv[2]), answers


def read_job() -> Any:
    """Reads the job from stdin, which is empty afterwards."""
    job = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.stdin = os.fdopen(0, closefd=False)
    return job


def _limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (lower, lower))


def failure_text(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {text_of(failure)}".removesuffix(": ")[:LONGEST_TEXT]


def text_of(value: Any) -> str:
    try:
        return str(value)[:LONGEST_TEXT]
    except BaseException:  # noqa: BLE001 - its class may be the candidate's
        return "(its text cannot be shown)"


def main() -> None:
    for name in PACKAGES:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = []
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    program = sys.argv.pop(1)
    import_module(f"{PACKAGES[-1]}.{program}").main()


if __name__ == "__main__":
    main()
