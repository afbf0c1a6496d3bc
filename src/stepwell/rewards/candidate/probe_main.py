"""The program that says what a sandbox holds: it tries to leave, and reports as JSON what it could do."""

import json
import os
from contextlib import suppress
from pathlib import Path

from stepwell.rewards.candidate.start import prepare, read_job

UNREADABLE = "it cannot read Python's own library"


def holes(secret: str) -> list[str]:
    """The harm that hostile code could do here. `secret` is a file outside."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    found = {
        "it sees the machine's network": len(Path("/proc/self/net/dev").read_text().splitlines()) > 3,
        "it sees other processes": len([name for name in os.listdir("/proc") if name.isdigit()]) > 3,
        "it reads the worker's files": Path(secret).exists(),
        "it can write to the root folder": os.access("/", os.W_OK),
        "it is root": os.geteuid() == 0,
        "it can gain rights (no_new_privs is off)": status["NoNewPrivs"].strip() != "1",
        "it has capabilities": int(status["CapEff"], 16) != 0,
        "its system calls are not filtered": status["Seccomp"].strip() != "2",
    }
    try:
        import unittest.mock  # noqa: F401 - a module that nothing has imported yet
    except ImportError:
        found[UNREADABLE] = True
    return [hole for hole, is_open in found.items() if is_open]


def main() -> None:
    _, answers = prepare()
    job = read_job()
    report: dict[str, object] = {"holes": ["it could not find out"]}
    with suppress(Exception):
        report = {"holes": holes(job["secret"])}
    os.write(answers, json.dumps(report).encode())
    os._exit(0)
