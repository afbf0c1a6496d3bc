"""Files and folders that only their owner can read, and which of them this process trusts.

- A process that is wholly ours, a command or a shard, calls `keep_files_private` before it makes a file.
- Code that also runs in a user's own process makes its files with `open_private`.
- A folder or file of another user, or one that others can change, is not trusted. The text says what to do.
"""

import grp
import os
import pwd
import stat
from pathlib import Path

PRIVATE_UMASK = 0o077
CHANGEABLE = stat.S_IWGRP | stat.S_IWOTH
ACCESSIBLE = stat.S_IRWXG | stat.S_IRWXO
LARGEST_SMALL_FILE = 2**16
"""Bytes of a file with a key, a token or an address."""


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
