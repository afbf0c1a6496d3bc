"""An environment's checkpoints: JSON files in a folder of its own, `CHECKPOINT_DIR/env_checkpoints/NAME/step-N.json`.

What always holds: a file is there whole or not at all. A living environment holds its folder by a lock, which the
system takes back however the process ends; so one that comes back after a crash, under a new name because the rollout
server still knows the old one, finds the folder that nobody holds and goes on with it.
"""

import fcntl
import json
import re
from pathlib import Path
from typing import IO, Any

from stepwell.common.atomic_files import replacing_file

FILE = re.compile(r"step-(\d+)\.json")


class Checkpoints:
    """The folder of one environment, held from the first thing written there until it is closed."""

    def __init__(self, folder: Path, lock: IO[str] | None = None) -> None:
        self.folder = folder
        self._lock = lock

    def write(self, step: int, data: dict[str, Any]) -> Path:
        text = json.dumps(data)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock or _hold(self.folder)
        path = self.folder / f"step-{step}.json"
        with replacing_file(path) as file:
            file.write(text.encode())
        return path

    def newest(self, step: int) -> Path | None:
        """The last one at or before this step."""
        return newest(self.folder, step)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def newest(folder: Path, step: int) -> Path | None:
    steps = [int(found[1]) for path in folder.glob("step-*.json") if (found := FILE.fullmatch(path.name))]
    reached = [each for each in steps if each <= step]
    return folder / f"step-{max(reached)}.json" if reached else None


def claim(checkpoint_dir: str, name: str, desired_name: str, step: int) -> Checkpoints:
    """The environment's folder. At a step above 0: its own, or one of the same desired name that nobody holds,
    whichever has a checkpoint; the first that has one is it."""
    root = Path(checkpoint_dir) / "env_checkpoints"
    for folder in [root / name, *_siblings(root, desired_name)] if step > 0 else []:
        if newest(folder, step) is not None and (lock := _hold(folder)) is not None:
            return Checkpoints(folder, lock)
    return Checkpoints(root / name)


def _siblings(root: Path, desired_name: str) -> list[Path]:
    numbered = re.compile(re.escape(desired_name) + r"_(\d+)")
    found = [(int(match[1]), path) for path in root.glob("*") if (match := numbered.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _hold(folder: Path) -> IO[str] | None:
    """The lock on the folder, to be kept open; None if another process has it."""
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock
