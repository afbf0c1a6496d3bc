"""D3: a pool whose disk was really full works again soon after space was freed, with all that it had acknowledged."""

import json
import os
import subprocess
import sys

import pytest

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0, reason="needs a mount namespace"
)
def test_a_pool_recovers_from_a_full_disk_and_loses_nothing() -> None:
    row = [sys.executable, "-m", "benchmarks.survival", "--only", "disk_full_journal", "--quick"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run([*NAMESPACE, *row], capture_output=True, text=True, timeout=240, env=environment)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    outcome = json.loads(ran.stdout.splitlines()[-1])
    assert outcome["figures"]["disk_full_journal.rollouts"] > 0
