"""Where a connection to a link process comes from: a child of this process, or one that several processes share."""

import os
import socket
import subprocess
import sys
from typing import Protocol


class LinkEnds(Protocol):
    """Where the socket to a link process comes from."""

    def open(self) -> socket.socket:
        """A new connection. OSError if there is none now."""

    def close(self) -> None:
        """The last connection is of no use any more."""


class OwnLinkProcess:
    """A child process for each connection. With a listener, it serves other processes too."""

    def __init__(self, address: str, namespace: str, listener: socket.socket | None = None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._command = (sys.executable, "-m", "stepwell.pool.client.link_process", address, namespace)
        self._listener = listener

    def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            passed = [end.fileno() for end in (theirs, self._listener) if end is not None]
            for descriptor in passed:
                os.set_inheritable(descriptor, True)
            self.process = subprocess.Popen(
                (*self._command, *map(str, passed)),
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # a Ctrl-C is for this process alone, which drains through the link
            )
        return ours

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class SharedLinkProcess:
    """The link that another process has started, and keeps running."""

    def __init__(self, path: str) -> None:
        """`path` is that of the unix socket at which the link listens."""
        self._path = path

    def open(self) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._path)
        except OSError:
            end.close()
            raise
        return end

    def close(self) -> None:
        """Who started it ends it."""
