"""Files that appear under their name only once they are complete.

Writing goes to a temporary name beside the target, `NAME.part`. A reader never sees half a file. What a killed process
left under the temporary name is overwritten or removed by the next writer.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepwell.common.private_files import open_private

SUFFIX = ".part"


def temporary_name(path: str) -> str:
    return path.rstrip("/") + SUFFIX


@contextmanager
def writing_under_temporary_name(fs: Any, path: str) -> Iterator[str]:
    """The temporary name of a file or folder of an fsspec file system. It becomes `path` at the end of the block; if
    the block fails, it is removed."""
    temporary = temporary_name(path)
    _remove(fs, temporary)
    fs.makedirs(path.rstrip("/").rpartition("/")[0], exist_ok=True)
    try:
        yield temporary
    except BaseException:
        _remove(fs, temporary)
        raise
    fs.mv(temporary, path, recursive=fs.isdir(temporary))


@contextmanager
def replacing_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` at the end of the block and is then on disk, also after a power failure. Only
    its owner can read it. If the block fails, `path` stays as it was."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")
    try:
        with open(temporary, "wb", opener=open_private) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _remove(fs: Any, path: str) -> None:
    if fs.exists(path):
        fs.rm(path, recursive=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
