"""LineChannel: one end of the connection between the code's process and its test's; a message is a line of JSON.

A question is [operation, arguments]. A reply is [outcome, content, changed, printed]:

| outcome | content |
|---|---|
| `value` | what the code returned |
| `raise` | the name of a built-in exception, and its arguments |
| `object` | in words, what the code returned that is no value |

`changed` is the arguments as the call left them, or None if it changed none; `printed` is what the code printed.
"""

import json
import socket
from typing import Any

MOST_BYTES = 2**24
"""Bytes of a message."""
MOST_PARTS = 2_000_000
"""Lists and parts of lists in a message; each takes a multiple of its bytes in memory."""


class Ended(Exception):
    """The other process has ended."""


class LineChannel:
    def __init__(self, descriptor: int) -> None:
        self._lines = socket.socket(fileno=descriptor).makefile("rwb")

    def send(self, message: Any) -> None:
        """ValueError if it is too long."""
        line = json.dumps(message, allow_nan=False).encode()
        if len(line) >= MOST_BYTES or _parts(line) > MOST_PARTS:
            raise ValueError("a value is too large to leave its process")
        try:
            self._lines.write(line + b"\n")
            self._lines.flush()
        except OSError:
            raise Ended from None

    def receive(self) -> Any:
        """ValueError if it is too long or no JSON."""
        try:
            line = self._lines.readline(MOST_BYTES)
        except OSError:
            line = b""
        if not line:
            raise Ended
        if not line.endswith(b"\n") or _parts(line) > MOST_PARTS:
            raise ValueError("a message is too long, or has no end")
        return json.loads(line)


def _parts(line: bytes) -> int:
    return line.count(b",") + line.count(b"[")
