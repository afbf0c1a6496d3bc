"""D6: with `--sync full`, what was acknowledged survives a loss of power; with `normal`, it survives a kill only."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet
import pytest

from rig.power_loss.archive_main import open_archive
from rig.power_loss.files_main import CONTENT
from rig.power_loss.lost_power import as_after_power_loss, preload, run_until_killed, survivors
from rig.preloads import SYNCED_ONLY, build, has_compiler
from rig.waiting import wait_until
from stepwell.pool.api.plan import Limits
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.archive_files import FOLDER as LINEAGE
from stepwell.pool.shard.archive_files import FOLDER as REWARDS
from stepwell.pool.shard.recovery import restore_pool
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.groups import lineage_name

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs gcc")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(SYNCED_ONLY, tmp_path_factory.mktemp("shim"))


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


@pytest.mark.parametrize("moments", [6, pytest.param(50, marks=pytest.mark.nightly)])
def test_at_any_moment_a_trained_group_its_lineage_and_late_reward_survive_a_loss_of_power(
    shim: Path, tmp_path: Path, moments: int
) -> None:
    live, synced, printed = tmp_path / "live", tmp_path / "synced", tmp_path / "printed"
    with archiving_shard(shim, live, synced, printed) as process:
        for moment in range(1, moments + 1):
            wait_until(lambda: len(acknowledged(printed)) >= 7 * moment, "the shard")  # noqa: B023
            with as_after_power_loss(process, live, synced):
                kept = in_journal_or_archive(live)
                for what, uid in acknowledged(printed):
                    assert uid in kept[what], f"{what} {uid} is lost at moment {moment}"
                    assert what == "reward" or lineage_name(uid) in kept["lineage"]


def test_a_file_or_folder_under_its_final_name_survives_a_loss_of_power(shim: Path, tmp_path: Path) -> None:
    live, synced = tmp_path / "live", tmp_path / "synced"
    command = [sys.executable, "-m", "rig.power_loss.files_main", str(live)]
    environment, pipe = os.environ | preload(shim, live, synced), subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        with as_after_power_loss(process.pid, live, synced):
            files = {str(path.relative_to(live)): path.read_bytes() for path in live.rglob("*") if path.is_file()}
        process.kill()
    assert files == dict.fromkeys(("replaced", "deep/single", "dataset/inner/part", "final/weights"), CONTENT)


@contextmanager
def archiving_shard(shim: Path, live: Path, synced: Path, printed: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "rig.power_loss.archive_main", str(live)]
    environment = os.environ | preload(shim, live, synced)
    with printed.open("w") as output, subprocess.Popen(command, env=environment, stdout=output) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def acknowledged(printed: Path) -> list[tuple[str, str]]:
    lines = printed.read_text().split("\n")[:-1]
    return [(what, uid) for what, uid in map(str.split, lines)]


def in_journal_or_archive(live: Path) -> dict[str, set[str]]:
    """Trajectories of which the next process has what was acknowledged: in its journal, or in its archive when that has
    all of the journal that it waits for."""
    journal = SqliteJournal(live / "data_pool.sqlite", closed_kept=100)
    pool = Pool(Limits(), journal)
    assert not restore_pool(pool, journal).damaged
    archive = open_archive(live, journal)
    archive.flush()
    assert not archive.has_work
    journal.close()
    _, folder = archive.place
    return {
        "group": set(pool.state.trajectories) | in_archive(Path(folder)),
        "reward": in_archive(Path(folder) / REWARDS),
        "lineage": in_archive(Path(folder) / LINEAGE, "trajectory"),
    }


def in_archive(folder: Path, column: str = "trajectory_uid") -> set[str]:
    return {uid for file in folder.glob("*.parquet") for uid in pyarrow.parquet.read_table(file)[column].to_pylist()}
