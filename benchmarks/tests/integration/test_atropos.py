"""The benchmark of the Atropos server, run briefly: both servers do what it measures. It measures no speed here."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_both_servers_are_measured_side_by_side() -> None:
    command = [sys.executable, "-m", "benchmarks.atropos", "--quick"]
    run = subprocess.run(
        command, cwd=CHECKOUT, env={**os.environ}, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout, run.stderr
    closing = json.loads(run.stdout.splitlines()[-1])
    assert closing["targets"].keys() <= closing["figures"].keys()
    assert all(math.isfinite(figure) and figure > 0 for figure in closing["figures"].values()), closing
