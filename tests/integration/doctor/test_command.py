"""The command itself: its output, its exit status, and the check of a Ray cluster."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.gateways import free_port
from rig.ray_cluster import RayCluster
from rig.threads import in_thread


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with in_thread(FakeEngine()) as engine:
        yield engine


def doctor(engine: FakeEngine, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepwell", "doctor", "--engine", engine.url, *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_sound_engine_and_a_cluster_end_with_status_0(
    engine: FakeEngine, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    done = doctor(engine, tmp_path, "--ray-address", ray_cluster.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("Exact: what a gateway records of this engine is what it sampled.\n")
    assert re.search(rf"^ok +Ray +Ray \S+ at {ray_cluster.address}: 1 node, ", done.stdout, re.M), done.stdout
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_fault_and_a_cluster_that_is_not_there_end_with_status_1(engine: FakeEngine, tmp_path: Path) -> None:
    engine.faults = Faults(short_ids=True)
    done = doctor(engine, tmp_path, "--json", "--ray-address", f"127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert not done.stderr, "only the report mentions the gateway's errors"
    report = json.loads(done.stdout)
    assert report["exact"] is False
    marks = {check["name"]: check["mark"] for check in report["checks"]}
    assert (marks["Ray"], marks["engine"]) == ("fault", "ok")
    assert report["cases"][0]["cells"]["logprobs"]["mark"] == "fault"


def test_an_invalid_address_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepwell", "doctor", "--engine", "127.0.0.1:8001"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2
    assert "write http://host:port" in done.stderr
