"""Files that appear under their name only once they are complete, and are then on disk, also after a power failure.

- Writing goes to a temporary name beside the target, `NAME.part`. A reader never sees half a file. What a killed
  process left under the temporary name is overwritten or removed by the next writer.
- A disk may keep a new name and not the content, or the content and not the name. So the order is: write, sync the
  file, rename, sync the folder.
- A file system that is not local (S3, say) has a file when it is closed. Nothing is synced there.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepwell.common.files import open_private

SUFFIX = ".part"


def temporary_name(path: str) -> str:
    return path.rstrip("/") + SUFFIX


@contextmanager
def writing_under_temporary_name(fs: Any, path: str) -> Iterator[str]:
    """The temporary name of a file or folder of an fsspec file system. It becomes `path` at the end of the block; if
    the block fails, it is removed."""
    temporary, folder = temporary_name(path), path.rstrip("/").rpartition("/")[0]
    _remove(fs, temporary)
    make_folder(fs, folder)
    try:
        yield temporary
        if _is_local(fs):
            sync_paths(fs, temporary, *fs.find(temporary, withdirs=True))
    except BaseException:
        _remove(fs, temporary)
        raise
    fs.mv(temporary, path, recursive=fs.isdir(temporary))
    sync_paths(fs, folder)


@contextmanager
def replacing_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` at the end of the block. Only its owner can read it. If the block fails, `path`
    stays as it was."""
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
    sync_path(path.parent)


def rename_folder(unfinished: Path, path: Path) -> None:
    """Give a folder its final name, when the files in it are complete."""
    for found in (*unfinished.iterdir(), unfinished):
        sync_path(found)
    unfinished.rename(path)
    sync_path(path.parent)


def make_folder(fs: Any, folder: str) -> None:
    """A folder of an fsspec file system, with its parents."""
    missing = [one for one in (Path(folder), *Path(folder).parents) if _is_local(fs) and not one.exists()]
    fs.makedirs(folder, exist_ok=True)
    for one in missing:
        sync_path(one.parent)


def sync_paths(fs: Any, *paths: str) -> None:
    """Syncs as `sync_path` does, on an fsspec file system."""
    for path in paths if _is_local(fs) else ():
        sync_path(Path(path))


def sync_path(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as failure:
        if failure.errno != errno.EINVAL or not path.is_dir():  # some mounted object stores have no folders to sync
            raise
    finally:
        os.close(descriptor)


def _is_local(fs: Any) -> bool:
    return bool(getattr(fs, "local_file", False))


def _remove(fs: Any, path: str) -> None:
    if fs.exists(path):
        fs.rm(path, recursive=True)
