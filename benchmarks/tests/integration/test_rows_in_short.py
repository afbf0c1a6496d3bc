"""Rows of `python -m benchmarks.survival` in their short form, each a program of its own with its own Ray cluster.

What is lost, empty, twice or refused counts here. Seconds do not: other tests run beside it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rig.postgres import has_postgres

ROOT = Path(__file__).parents[3]
ROWS = ("disk_full_journal", "disk_small_forget")
SLOW_ROWS = (
    "dead_gateways",
    "gateways",
    "killed_clients",
    "live_kills",
    "node_lost_postgres",
    "resharding",
    "retries",
    "storm",
)
"""What each of them shows, tests/integration/survival shows in CI with fewer processes."""
MAY_MOUNT = ("unshare", "--user", "--map-root-user", "--mount")
"""The small disk is mounted in a namespace of its own."""
TIMEOUT = 600.0


@pytest.mark.parametrize(
    "row",
    [
        *ROWS,
        *(pytest.param(row, marks=pytest.mark.nightly) for row in SLOW_ROWS),
    ],
)
def test_nothing_is_lost_and_nothing_comes_twice(row: str) -> None:
    if "postgres" in row and not has_postgres():
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    if "disk" in row and subprocess.run([*MAY_MOUNT, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace is needed")
    line = [sys.executable, "-m", "benchmarks.survival", "--quick", "--only", row]
    line = [*MAY_MOUNT, *line] if "disk" in row else line
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    report = json.loads(ended.stdout.splitlines()[-1])
    assert len(report["targets"]) > 1, ended.stderr
    assert [name for name in report["missed"] if not name.endswith("_s")] == [], ended.stdout + ended.stderr
