"""Where a connection to a link process comes from: a child of this process, or one that several processes share."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from stepwell.pool.client.link_messages import STARTING, LinkState, open_stream, read_frame_blocking

FIRST_STATE_TIMEOUT = 60.0
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class LinkEnds(Protocol):
    """Where the connection to a link process comes from."""

    def first_state(self) -> LinkState:
        """Connects, and waits until the process has tried to join. STARTING if it does not say so in time."""

    async def connect(self) -> Streams:
        """A new connection; at first that of `first_state`, if it is kept. OSError if there is none now."""

    def close(self) -> None:
        """The last connection is of no use any more."""


class SocketEnds:
    """Connections that are sockets of this machine."""

    def __init__(self) -> None:
        self._unserved: socket.socket | None = None
        """A connection that nobody has taken yet."""

    def open(self) -> socket.socket:
        """A new connection. OSError if there is none now."""
        raise NotImplementedError

    def first_state(self) -> LinkState:
        self._unserved = self.open()
        self._unserved.settimeout(FIRST_STATE_TIMEOUT)
        state = STARTING
        try:
            while state == STARTING:
                state = read_frame_blocking(self._unserved)
        except OSError:
            return STARTING
        return state

    async def connect(self) -> Streams:
        end, self._unserved = self._unserved or self.open(), None
        return await open_stream(end)

    def close(self) -> None:
        if self._unserved is not None:
            self._unserved.close()
            self._unserved = None


class OwnLinkProcess(SocketEnds):
    """A child process for each connection. With a listener, it serves other processes too."""

    def __init__(
        self, address: str, namespace: str, listener: socket.socket | None = None, network: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.process: subprocess.Popen[bytes] | None = None
        self._command = (sys.executable, "-m", "stepwell.pool.client.link_process", address, namespace)
        self._listener = listener
        self._network = network

    def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            passed = [end.fileno() for end in (theirs, self._listener) if end is not None]
            for descriptor in passed:
                os.set_inheritable(descriptor, True)
            self.process = subprocess.Popen(
                (*self._command, *map(str, passed), *self._network),
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # a Ctrl-C is for this process alone, which drains through the link
            )
        return ours

    def close(self) -> None:
        super().close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class SharedLinkProcess(SocketEnds):
    """The link that another process has started, and keeps running."""

    def __init__(self, path: str) -> None:
        """`path` is that of the unix socket at which the link listens."""
        super().__init__()
        self._path = path

    def open(self) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._path)
        except OSError:
            end.close()
            raise
        return end
