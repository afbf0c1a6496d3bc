"""D3: a shard whose disk was really full works again soon after space was freed, with all that it had acknowledged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
DISK = "24m"
HEALED = 10.0


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0, reason="needs a mount namespace"
)
def test_a_shard_recovers_from_a_full_disk_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    scenario = f"{sys.executable} -m tests.integration.survival.full_disk_scenario {disk}"
    shell = f"mount -t tmpfs -o size={DISK} tmpfs {disk} && exec {scenario}"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run([*NAMESPACE, "sh", "-c", shell], capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert any("disk is full" in refusal or "restart" in refusal or "away" in refusal for refusal in result["refusals"])
    assert result["still there"] == result["acknowledged"] > 5
    assert result["healed after"] < HEALED
