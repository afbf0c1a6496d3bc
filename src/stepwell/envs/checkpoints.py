"""An environment's checkpoints: JSON files in a folder of its own, `CHECKPOINT_DIR/env_checkpoints/NAME/step-N.json`.

- A file is written completely or not at all.
- A running environment locks its folder; the system releases the lock when the process ends, in any way. After a crash
  the rollout server still knows the old name, so the environment gets a new one; it then finds the folder of its old
  name unlocked and continues with it.
"""

import fcntl
import json
import re
from pathlib import Path
from typing import IO, Any

from stepwell.common.files import replacing_file

FILE = re.compile(r"step-(\d+)\.json")


class Checkpoints:
    """The folder of one environment, locked from the first write until it is closed."""

    def __init__(self, folder: Path, lock: IO[str] | None = None) -> None:
        self.folder = folder
        self._lock = lock

    def write(self, step: int, data: dict[str, Any]) -> Path:
        text = json.dumps(data)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock or _lock_folder(self.folder)
        path = self.folder / f"step-{step}.json"
        with replacing_file(path) as file:
            file.write(text.encode())
        return path

    def newest(self, step: int) -> Path | None:
        """The last checkpoint at or before this step."""
        names = (FILE.fullmatch(path.name) for path in self.folder.glob("step-*.json"))
        earlier = [int(name[1]) for name in names if name and int(name[1]) <= step]
        return self.folder / f"step-{max(earlier)}.json" if earlier else None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def claim(checkpoint_dir: str, name: str, desired_name: str, step: int) -> Checkpoints:
    """The environment's folder. At a step above 0 it is the first that has a checkpoint: its own, or an unlocked one
    of the same desired name."""
    root = Path(checkpoint_dir) / "env_checkpoints"
    for folder in [root / name, *_siblings(root, desired_name)] if step > 0 else []:
        if Checkpoints(folder).newest(step) is not None and (lock := _lock_folder(folder)) is not None:
            return Checkpoints(folder, lock)
    return Checkpoints(root / name)


def _siblings(root: Path, desired_name: str) -> list[Path]:
    numbered = re.compile(re.escape(desired_name) + r"_(\d+)")
    matches = [(int(match[1]), path) for path in root.glob("*") if (match := numbered.fullmatch(path.name))]
    return [path for _, path in sorted(matches)]


def _lock_folder(folder: Path) -> IO[str] | None:
    """The open lock file; None if another process holds the lock."""
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock
