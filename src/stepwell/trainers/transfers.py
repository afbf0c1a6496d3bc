"""How weights get from a trainer into the engines: through checkpoint folders."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepwell.common.files import rename_folder
from stepwell.common.imports import require
from stepwell.engines.engine import EngineControl
from stepwell.errors import Conflict

FOLDERS = ("a", "b")
UNFINISHED = "unfinished"
FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"
MAX_FILE_BYTES = 2**28
"""Bytes of tensors in one file, which are in memory at once."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class CheckpointTransfer:
    """Writes the weights into `folder`, and the engines load them: they must see it under the same path.

    Two subfolders are used in turn, so the weights before the last ones stay whole; a subfolder is whole or absent. The
    other files of the model folder `like` (configuration, tokenizer) are copied beside the weights, so either
    subfolder is a model that can be served and loaded. A file has at most `max_file_bytes`, or one larger tensor: so
    much memory is needed beside the model.
    """

    def __init__(self, folder: Path, *, like: Path | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = folder.absolute()
        self._like = like
        self._max_file_bytes = max_file_bytes
        self._place = self._folder / FOLDERS[0]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """While it is open, no other process syncs through this folder. Conflict if one does."""
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

    def prepare(self, weights: WeightStream, engines: Sequence[EngineControl]) -> None:
        """Writes the weights while the engines still serve. The stream is read once."""
        self._place = min((self._folder / name for name in FOLDERS), key=_written_at)
        unfinished = self._folder / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self._copy_other_files(unfinished)
        write_checkpoint(weights, unfinished, self._max_file_bytes)
        shutil.rmtree(self._place, ignore_errors=True)
        rename_folder(unfinished, self._place)

    def update(self, engines: Sequence[EngineControl]) -> None:
        """Puts the written weights into the engines, which are paused."""
        for engine in engines:
            engine.load_checkpoint(self._place)

    def _copy_other_files(self, folder: Path) -> None:
        for file in [] if self._like is None else self._like.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                shutil.copyfile(file, folder / file.name)


def write_checkpoint(weights: WeightStream, folder: Path, max_file_bytes: int) -> None:
    """One file, or several and an index, as Hugging Face's libraries name them."""
    require("safetensors", "train")
    from safetensors.torch import save_file

    file_of: dict[str, str] = {}
    for number, chunk in enumerate(split_stream(weights, max_file_bytes), 1):
        file = f"model-{number:05d}.safetensors"
        file_of |= dict.fromkeys(chunk, file)
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in chunk.items()},
            folder / file,
            metadata={"format": "pt"},
        )
    if len(set(file_of.values())) == 1:
        (folder / file).rename(folder / FILE)
    else:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def _written_at(place: Path) -> float:
    return place.stat().st_mtime if place.exists() else 0.0
