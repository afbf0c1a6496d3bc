"""D6: with `--sync full`, what was acknowledged survives a loss of power; with `normal`, it survives a kill only."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.pool.api.plan import Limits
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.recovery import restore_pool
from stepwell.pool.shard.sqlite_journal import SqliteJournal

SHIM = Path(__file__).parents[2] / "rig" / "power_loss" / "synced_only.c"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "synced_only.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    return library


def run_until_killed(shim: Path, folder: Path, sync: str, acknowledged: int) -> set[str]:
    """Run a shard, kill it after so many acknowledged steps. Returns their trajectories."""
    (folder / "live").mkdir(exist_ok=True)
    (folder / "synced").mkdir(exist_ok=True)
    live = folder / "live" / "data_pool.sqlite"
    preload = {"LD_PRELOAD": str(shim), "SYNCED_FROM": str(live.parent), "SYNCED_TO": str(folder / "synced")}
    command = [sys.executable, "-m", "tests.rig.power_loss.shard_main", str(live), sync]
    with subprocess.Popen(command, env=os.environ | preload, stdout=subprocess.PIPE, text=True) as shard:
        assert shard.stdout is not None
        numbers = [shard.stdout.readline().strip() for _ in range(acknowledged)]
        shard.send_signal(signal.SIGKILL)
        *others, _ = shard.stdout.read().split("\n")
        return {f"t{number}" for number in (*numbers, *others)}


def survivors(path: Path) -> set[str]:
    journal = SqliteJournal(path, closed_kept=100)
    pool = Pool(Limits(), journal)
    report = restore_pool(pool, journal)
    journal.close()
    assert not report.damaged
    return set(pool.state.trajectories)


@pytest.mark.parametrize("acknowledged", [1, 57, 400])
def test_under_full_all_that_was_acknowledged_survives_a_loss_of_power(
    shim: Path, tmp_path: Path, acknowledged: int
) -> None:
    done = run_until_killed(shim, tmp_path, "full", acknowledged)
    assert len(done) >= acknowledged
    assert done <= survivors(tmp_path / "synced" / "data_pool.sqlite")


def test_under_normal_a_kill_costs_nothing_and_a_loss_of_power_the_last_changes(shim: Path, tmp_path: Path) -> None:
    done = run_until_killed(shim, tmp_path, "normal", 200)
    assert done <= survivors(tmp_path / "live" / "data_pool.sqlite")
    synced = tmp_path / "synced" / "data_pool.sqlite"
    assert not synced.exists() or len(done & survivors(synced)) < len(done)
