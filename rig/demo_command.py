"""`stepwell demo` as a command, and what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

LONGEST = 1_500.0
"""Seconds; it takes some hundred on two cores that have nothing else to do."""


SHORT_WARM_UP = """
import sys
from functools import partial
from stepwell import cli
from stepwell.demo import run

run.warm_up = partial(run.warm_up, steps=100)
cli.main(["demo", *sys.argv[1:]])
"""
"""The command, with a quarter of its warm-up."""


def demo(
    *flags: str, env: dict[str, str] | None = None, short_warm_up: bool = False
) -> "subprocess.CompletedProcess[str]":
    program = ("-c", SHORT_WARM_UP) if short_warm_up else ("-m", "stepwell", "demo")
    command = [sys.executable, *program, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LONGEST, env={**os.environ, **(env or {})}
    )


def mentioning(text: str) -> list[str]:
    """The command lines of running processes that have it in them."""
    lines = [_command_line(folder) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [line for line in lines if text in line]


def _command_line(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text().replace("\0", " ")
    except OSError:  # it has just ended
        return ""
