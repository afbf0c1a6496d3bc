"""SQLite files that must survive a kill: opened in WAL mode, set aside when damaged.

- A change is in the file as a whole or not at all. A kill of the process loses no committed change.
- `sqlite3.OperationalError` means that the file cannot be used now (locked, no permission, full disk). Any other
  `sqlite3.DatabaseError` means that the file is damaged.
"""

import sqlite3
import struct
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage

from stepwell.common.files import create_private

PAGE_SIZE = 16_384
WAL_HEADER, FRAME_HEADER = 32, 24
"""Bytes."""
MAX_SET_ASIDE = 1000
MORE_ROOM = 2**24
"""Bytes that stay free when a file is written again."""


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
