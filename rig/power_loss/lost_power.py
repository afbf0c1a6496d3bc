"""A shard that loses power: it is killed, and of what it wrote only that is left which it had synced."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rig.preloads import preloaded
from stepwell.pool.api.plan import Limits
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.recovery import restore_pool
from stepwell.pool.shard.sqlite_journal import SqliteJournal

UNNAMED = ".unnamed"


def preload(library: Path, live: Path, synced: Path) -> dict[str, str]:
    """The environment of a process that writes to the folder `live`."""
    live.mkdir(exist_ok=True)
    synced.mkdir(exist_ok=True)
    return preloaded(library, SYNCED_FROM=live, SYNCED_TO=synced)


def lose_power(process: int, synced: Path) -> Path:
    """Kill a process that has the library. Returns a file that is there until the next process has what was synced."""
    lost = synced.with_name(f"{synced.name}.lost")
    lost.write_text(str(process))
    os.kill(process, signal.SIGKILL)
    return lost


def run_until_killed(library: Path, folder: Path, sync: str, acknowledged: int) -> set[str]:
    """Run a shard, kill it after so many acknowledged steps. Returns their trajectories."""
    live = folder / "live" / "data_pool.sqlite"
    environment = os.environ | preload(library, live.parent, folder / "synced")
    command = [sys.executable, "-m", "rig.power_loss.shard_main", str(live), sync]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as shard:
        assert shard.stdout is not None
        numbers = [shard.stdout.readline().strip() for _ in range(acknowledged)]
        shard.send_signal(signal.SIGKILL)
        *others, _ = shard.stdout.read().split("\n")
        return {f"t{number}" for number in (*numbers, *others)}


def survivors(path: Path) -> set[str]:
    """The trajectories in a journal."""
    journal = SqliteJournal(path, closed_kept=100)
    pool = Pool(Limits(), journal)
    report = restore_pool(pool, journal)
    journal.close()
    assert not report.damaged
    return set(pool.state.trajectories)


@contextmanager
def as_after_power_loss(process: int, live: Path, synced: Path) -> Iterator[None]:
    """Stop a process that has the library. Within the block, `live` is what a loss of power would leave. After it, the
    process goes on as if nothing had happened."""
    os.kill(process, signal.SIGSTOP)
    os.waitid(os.P_PID, process, os.WSTOPPED)
    running = live.rename(live.with_name("running"))
    try:
        shutil.copytree(synced, live, ignore=_unsynced)
        yield
    finally:
        shutil.rmtree(live, ignore_errors=True)
        running.rename(live)
        os.kill(process, signal.SIGCONT)


def _unsynced(folder: str, names: list[str]) -> list[str]:
    """What has no name yet on the disk."""
    nameless = [name for name in names if (Path(folder) / name / UNNAMED).exists()]
    return [*nameless, *(name for name in names if name.endswith((UNNAMED, ".partial")))]
