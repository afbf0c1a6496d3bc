"""The record of control calls: who did what, with which result. A file of JSON lines that is only appended to.

- Each line has its own SHA-256 and that of the line before. A line that is changed, removed from between, added or
  moved breaks the chain. What was cut off at the end is told by a hash that was noted before.
- A line is written when the answer is; a power failure may take the last ones. One that a crash left unfinished is
  removed by the next writer.
- One process writes a file.
"""

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from stepwell.access.caller import Caller
from stepwell.common.files import open_private
from stepwell.errors import BadRequest, Conflict

log = logging.getLogger("stepwell.access")

FIRST = "0" * 64
"""The hash before the first line."""
ENDING = re.compile(rb',"hash":"([0-9a-f]{64})"\}')
ENDING_LENGTH = len(FIRST) + len(',"hash":""}')
LONGEST_CALL = 1_000
TAIL = 2**16
"""Bytes at the end of a file that hold its last line."""


class AuditLog:
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Conflict if another process writes the file, or if its last line is not one of ours."""
        self._path = path
        self._clock = clock
        try:
            self._file = open(path, "a+b", buffering=0, opener=open_private)  # noqa: SIM115 - open while it serves
        except OSError as failure:
            raise BadRequest(f"{path} cannot be written: {failure.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = os.fstat(self._file.fileno()).st_size
            self._last = self._resume()
        except BlockingIOError:
            self.close()
            raise Conflict(f"another process writes {path}; give each server a file of its own") from None
        except BaseException:
            self.close()
            raise

    def add(self, caller: Caller, call: str, status: int) -> None:
        """If the disk does not take it, the log says so, and the chain goes on without it."""
        entry = {
            "at": round(self._clock(), 3),
            "key": caller.id,
            "role": caller.role,
            "call": call[:LONGEST_CALL],
            "status": status,
            "previous": self._last,
        }
        body = json.dumps(entry, separators=(",", ":")).encode()
        digest = sha256(body).hexdigest()
        line = body[:-1] + f',"hash":"{digest}"}}\n'.encode()
        try:
            written = self._file.write(line)
            if written != len(line):
                os.ftruncate(self._file.fileno(), self._size)
                raise OSError(None, "the disk is full")
        except OSError as failure:
            log.error("%s does not take an entry (%s): %s by %s", self._path, failure.strerror, call, caller.id)
            return
        self._size += len(line)
        self._last = digest

    def close(self) -> None:
        self._file.close()

    def _resume(self) -> str:
        """The hash of the last line. What follows the last end of a line is removed."""
        start = max(0, self._size - TAIL)
        tail = os.pread(self._file.fileno(), TAIL, start)
        whole, end, torn = tail.rpartition(b"\n")
        if torn:
            log.warning("%s ended with an unfinished line, which is removed", self._path)
            self._size -= len(torn)
            os.ftruncate(self._file.fileno(), self._size)
        if not end:
            return FIRST
        digest, why = _read_line(whole.rpartition(b"\n")[2])
        if why:
            raise Conflict(f"the last line of {self._path} {why}; `stepwell audit verify` says more. Move it away")
        return digest


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """The result of the check of a file."""

    lines: int
    last: str
    """The hash of the last line."""
    fault: str = ""
    """The first fault and its line; empty if there is none."""


def verify(lines: Iterable[bytes], seen: str = "") -> AuditCheck:
    """Check the chain up to its first fault. `seen` is a hash that the file had before, and must still have."""
    previous, number, is_seen = FIRST, 0, seen in ("", FIRST)
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return AuditCheck(number, previous, f"line {number} is unfinished")
        digest, why = _read_line(line[:-1])
        if not why and json.loads(line).get("previous") != previous:
            why = "does not follow the line before it: a line was removed, added or moved"
        if why:
            return AuditCheck(number, previous, f"line {number} {why}")
        previous = digest
        is_seen = is_seen or digest == seen
    if not is_seen:
        return AuditCheck(number, previous, f"no line has the hash {seen}: lines at the end were removed")
    return AuditCheck(number, previous)


def _read_line(line: bytes) -> tuple[str, str]:
    """The hash of the line, and its fault; the fault is empty if there is none."""
    found = ENDING.fullmatch(line, max(0, len(line) - ENDING_LENGTH))
    if found is None:
        return "", "is not an entry"
    digest = sha256(line[: found.start()] + b"}").hexdigest()
    if digest.encode() != found[1]:
        return "", "was changed"
    try:
        is_object = isinstance(json.loads(line), dict)
    except ValueError:
        is_object = False
    return digest, "" if is_object else "is not an entry"


def call_text(scope: Mapping[str, Any]) -> str:
    """The call, as the log names it: method, path and query. Bodies are not recorded."""
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{scope['method']} {scope['path']}" + (f"?{query}" if query else "")
