"""Files: complete or absent after a crash, readable only by their owner, and SQLite files that survive a kill.

- Writing goes to a temporary name beside the target, `NAME.part`. A reader never sees half a file. What a killed
  process left under the temporary name is overwritten or removed by the next writer.
- A disk may keep a new name and not the content, or the content and not the name. So the order is: write, sync the
  file, rename, sync the folder. A file system that is not local (S3, say) has a file when it is closed: nothing is
  synced there.
- A process that is wholly ours, a command or a shard, calls `keep_files_private` before it makes a file. Code that also
  runs in a user's own process makes its files with `open_private`.
- A folder or file of another user, or one that others can change, is not trusted. The text says what to do.
- A change of an SQLite file is in it as a whole or not at all. `sqlite3.OperationalError` means that it cannot be used
  now (locked, no permission, full disk), any other `sqlite3.DatabaseError` that it is damaged.
"""

import errno
import grp
import os
import pwd
import sqlite3
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import IO, Any

SUFFIX = ".part"

PRIVATE_UMASK = 0o077
CHANGEABLE = stat.S_IWGRP | stat.S_IWOTH
ACCESSIBLE = stat.S_IRWXG | stat.S_IRWXO
LARGEST_SMALL_FILE = 2**16
"""Bytes of a file with a key, a token or an address."""

PAGE_SIZE = 16_384
WAL_HEADER, FRAME_HEADER = 32, 24
"""Bytes."""
MAX_SET_ASIDE = 1000
MORE_ROOM = 2**24
"""Bytes that stay free when a file is written again."""


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


def keep_files_private() -> None:
    """Every file and folder that this process and its children make from now on is readable only by their user."""
    os.umask(PRIVATE_UMASK)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open()`: a new file gets mode 0600. An existing file keeps its mode."""
    return os.open(path, flags, 0o600)


def create_private(path: Path) -> None:
    """Make an empty file with mode 0600 if there is none."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def why_folder_is_not_ours(path: Path) -> str | None:
    """A reason not to keep secrets in a folder: another user could have put files there, or can read them."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    return _why_not_ours(found, ACCESSIBLE)


def read_own(path: Path) -> str:
    """The text of a small file that this user made and that only this user can change.

    FileNotFoundError if there is none, PermissionError with the reason if it is not trusted.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as failure:
        raise PermissionError(f"it cannot be read as a file of yours ({failure.strerror})") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        why = _why_not_ours(found, CHANGEABLE) if stat.S_ISREG(found.st_mode) else "it is not a regular file"
        if why is None and found.st_nlink != 1:
            why = "it has a second name (a hard link)"
        if why is not None:
            raise PermissionError(why)
        return file.read(LARGEST_SMALL_FILE).decode(errors="replace")


def _why_not_ours(found: os.stat_result, unwanted: int) -> str | None:
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and you are user {os.geteuid()}"
    if unwanted == CHANGEABLE and _is_group_of_one(found.st_gid):
        unwanted = stat.S_IWOTH  # many systems give a user's files to a group of that user alone, which may change them
    if found.st_mode & unwanted:
        return f"other users can {'change' if found.st_mode & CHANGEABLE else 'read'} it (its mode is {_mode(found)})"
    return None


def _is_group_of_one(number: int) -> bool:
    """Whether the group belongs to this user alone."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return (group.gr_name, group.gr_gid) == (user.pw_name, user.pw_gid) and set(group.gr_mem) <= {user.pw_name}


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"


def open_wal(
    path: Path, *, exclusive: bool = False, sync: bool = False, lock_timeout: float = 5.0
) -> sqlite3.Connection:
    """Open a database in WAL mode, with explicit transactions. The folder is created if it is missing. Only its
    owner can read a new file and its log.

    With `sync`, a commit is on the disk when it returns, and survives a loss of power. Without, it survives a kill of
    the process. With `exclusive`, no other process can open the file from the first change until this process closes it
    or ends.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # SQLite says why it cannot be opened
        create_private(path)  # its log gets the same mode
    db = sqlite3.connect(path, timeout=lock_timeout, isolation_level=None, check_same_thread=False)
    try:
        db.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        if exclusive:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def set_aside_damaged(path: Path) -> Path:
    """Rename a closed database and its log files to a free name beside it. Returns the new path."""
    candidates = (path.with_name(f"{path.name}.damaged-{n}") for n in range(MAX_SET_ASIDE))
    aside = next(candidate for candidate in candidates if not candidate.exists())
    for suffix in ("", "-wal", "-shm"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(aside.with_name(aside.name + suffix))
    return aside


def scrub_database(db: sqlite3.Connection) -> None:
    """Write the whole file again, so that no page has anything of deleted rows, and empty the write-ahead log.

    sqlite3.OperationalError if it cannot be done now: another process reads the file, or the disk has no room for a
    copy in a temporary file and one in the log. It takes about a second for each gigabyte.
    """
    _, _, file = db.execute("PRAGMA database_list").fetchone()
    if (needed := 2 * Path(file).stat().st_size + MORE_ROOM) > disk_usage(Path(file).parent).free:
        raise sqlite3.OperationalError(f"{needed / 2**20:.0f} MiB of free space are needed to write the file again")
    db.execute("PRAGMA secure_delete = ON")
    try:
        db.execute("VACUUM")
        busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        db.execute("PRAGMA secure_delete = OFF")
    if busy:
        raise sqlite3.OperationalError("another process reads the file")


def count_wal_frames(path: Path) -> int:
    """Frames in the current generation of the write-ahead log, complete or torn; 0 if there is no log.

    SQLite silently ignores frames at the end that belong to no committed transaction. The difference between this
    count and the number of frames that SQLite recovers is the number of torn frames.
    """
    wal = path.with_name(path.name + "-wal")
    if not wal.exists():
        return 0
    with wal.open("rb") as file:
        header = file.read(WAL_HEADER)
        if len(header) < WAL_HEADER:
            return 0
        page_size, salt = struct.unpack(">I", header[8:12])[0], header[16:24]
        frames = 0
        while len(frame := file.read(FRAME_HEADER)) == FRAME_HEADER and frame[8:16] == salt:
            frames += 1
            file.seek(page_size, 1)
        return frames
