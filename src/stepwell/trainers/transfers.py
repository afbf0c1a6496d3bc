"""How weights get from a trainer into the engines: through files (here), or over NCCL (nccl.py)."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from stepwell.common.optional import require
from stepwell.engines.engine import EngineControl
from stepwell.errors import Conflict

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Weights: TypeAlias = "Mapping[str, torch.Tensor]"
"""By the names of the checkpoint that the engine was started with."""

FOLDERS = ("a", "b")
FILE = "model.safetensors"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class Transfer(Protocol):
    is_collective: bool
    """All engines must take part in an update at once: an engine that joins waits for the next sync. Otherwise the
    prepared weights can be put into one more engine at any time."""

    def exclusive(self) -> AbstractContextManager[None]:
        """While it is open, no other process syncs through this transfer. Conflict if one does."""

    def prepare(self, weights: Weights, engines: Sequence[EngineControl]) -> None:
        """What can be done while the engines still serve."""

    def update(self, engines: Sequence[EngineControl]) -> None:
        """Puts the prepared weights into the engines, which are paused."""


class CheckpointTransfer:
    """Writes the weights into `folder`, and the engines load them: they must see it under the same path.

    Two subfolders are used in turn, so the weights before the last ones stay whole; a file is whole or absent. The
    other files of the model folder `like` (configuration, tokenizer) are copied beside the weights, so either
    subfolder is a model that can be served and loaded.
    """

    is_collective = False

    def __init__(self, folder: Path, *, like: Path | None = None) -> None:
        self._folder = folder.absolute()
        self._like = like
        self._place = self._folder / FOLDERS[0]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        from fcntl import LOCK_EX, LOCK_NB, flock

        self._folder.mkdir(parents=True, exist_ok=True)
        with self._folder.with_name(f"{self._folder.name}.lock").open("a+") as lock:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = f"process {number}" if (number := lock.read()) else "another process"
                text = f"{owner} is syncing weights through {self._folder}: two trainers overwrite each other's weights"
                raise Conflict(f"{text}; give each its own engines and its own folder") from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def prepare(self, weights: Weights, engines: Sequence[EngineControl]) -> None:
        require("safetensors", "train")
        from safetensors.torch import save_file

        self._place = min((self._folder / name for name in FOLDERS), key=_written_at)
        self._place.mkdir(parents=True, exist_ok=True)
        self._copy_other_files()
        unfinished = self._place / f"{FILE}.tmp"
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(plain, unfinished, metadata={"format": "pt"})
        os.replace(unfinished, self._place / FILE)

    def update(self, engines: Sequence[EngineControl]) -> None:
        on_each(engines, lambda engine: engine.load_checkpoint(self._place))

    def _copy_other_files(self) -> None:
        for file in [] if self._like is None else self._like.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not (self._place / file.name).exists():
                shutil.copyfile(file, self._place / file.name)


def on_each(engines: Sequence[EngineControl], call: Callable[[EngineControl], T]) -> list[T]:
    """Calls all engines at once; returns when all have answered, and raises the first failure."""
    with ThreadPoolExecutor(len(engines)) as threads:
        return [future.result() for future in [threads.submit(call, engine) for engine in engines]]


def _written_at(place: Path) -> float:
    file = place / FILE
    return file.stat().st_mtime if file.exists() else 0.0
