"""A child process that gets and sends frames, a length and so many bytes, over a socket that is its stdin.

- Killing it kills what it started. Its end is awaited, so there are no zombies.
- A kernel that ends a child with its parent does so when the thread that started the child ends: start it in the main
  thread.
"""

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

from stepwell.common.async_calls import in_thread, run_to_end
from stepwell.common.processes import kill_group

LENGTH = struct.Struct("<Q")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "false"}
"""Defaults: a child does the work of one thread, and the memory that threads reserve would count as used."""


class FramedChild:
    """Made by `start`; whoever gets it closes it."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(
        cls, command: Sequence[str], *, output: int = subprocess.DEVNULL, pass_fds: Sequence[int] = ()
    ) -> "FramedChild":
        """`output` is a descriptor for what the child prints. OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = _spawn(command, theirs, output, pass_fds)
            except OSError:
                writer.close()
                raise
        return cls(process, reader, writer)

    async def send(self, *messages: bytes) -> None:
        self._writer.write(b"".join(map(framed, messages)))
        await self._writer.drain()

    async def receive(self) -> bytes:
        """IncompleteReadError at its end."""
        return await read_frame(self._reader)

    def kill(self) -> None:
        if self._process.returncode is None:
            kill_group(self._process)

    async def wait(self) -> int:
        """The exit code of the child, after it has ended."""
        return await in_thread(self._process.wait)

    async def end(self, grace: float) -> int:
        """Waits for the exit code; if the child does not end within `grace` seconds, it is killed. What it started
        is killed."""
        if self._process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self.wait()
            kill_group(self._process)
        return await self.wait()

    async def close(self) -> None:
        """Kills it if it has not ended. A cancelled caller still waits until that is done."""
        await run_to_end(self._close())

    async def _close(self) -> None:
        self.kill()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await self.wait()


def _spawn(
    command: Sequence[str], stdin: socket.socket, output: int, pass_fds: Sequence[int]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=stdin.fileno(),
        stdout=output,
        stderr=output,
        pass_fds=pass_fds,
        start_new_session=True,
        env=ENVIRONMENT | os.environ,
    )


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """IncompleteReadError at the end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def read_frame_from(file: BinaryIO) -> bytes | None:
    """None at the end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return file.read(LENGTH.unpack(head)[0])
