"""What a benchmark gave: one JSON file for each, in benchmarks/results/, of which docs/benchmarks.md is made.

A file says on which machine, but names neither the host nor a path.
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / "benchmarks" / "results"
DATE = "%Y-%m-%d %H:%M UTC"
NEVER = 1e9
"""How a benchmark writes a figure that could not be measured: JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    date: str
    commit: str
    machine: Mapping[str, Any]
    command: str
    ok: bool
    missed: Sequence[str]
    figures: Mapping[str, float]
    targets: Mapping[str, str]
    failure: str = ""
    """Why there are no figures."""

    @classmethod
    def read(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text()))

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    def targets_met(self) -> dict[str, bool]:
        return {figure: figure not in self.missed for figure in self.targets}


def read_results(folder: Path = FOLDER) -> dict[str, Result]:
    return {file.stem: Result.read(file) for file in sorted(folder.glob("*.json"))}


def closing_line(output: str) -> Mapping[str, Any] | None:
    """The object that a benchmark prints last; None if it ended before."""
    lines = output.strip().splitlines()
    try:
        told = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return told if isinstance(told, dict) and {"ok", "missed", "figures", "targets"} <= told.keys() else None


def now() -> str:
    return datetime.now(UTC).strftime(DATE)


def age(result: Result) -> timedelta:
    return datetime.now(UTC) - datetime.strptime(result.date, DATE).replace(tzinfo=UTC)


def commit(checkout: Path = CHECKOUT) -> str:
    """The code that is measured, and whether it differs from its commit."""
    head = _git(checkout, "rev-parse", "--short=12", "HEAD").strip()
    changed = _git(checkout, "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    return (f"{head} with changes" if changed else head) if head else "unknown"


def _git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def machine() -> dict[str, Any]:
    """With the load before the benchmark: other work on the machine makes figures worse."""
    return {
        "cpu": _found(r"model name\s*: (.+)", Path("/proc/cpuinfo")) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def _found(pattern: str, file: Path) -> str:
    match = re.search(pattern, file.read_text()) if file.exists() else None
    return match[1].strip() if match else ""
