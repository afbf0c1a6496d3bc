"""A child process, as whoever started it holds it: listened to, waited for, killed.

What always holds: what it writes is read as it comes, in bounded memory; its end is seen even while something that it
started still holds its pipes (asyncio's own processes do not see it then); closing it kills what is left of it and of
all that it started.
"""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from stepwell.common.async_calls import in_thread

CHUNK = 2**16
LONGEST_LINE = 2**16
"""Bytes; the rest of a longer line is dropped."""
LAST_WORDS = 1.0
"""Seconds for what a child that has ended has still in its pipes."""

Hear = Callable[[str], None]


class Child:
    """Made inside an event loop; whoever makes it closes it. OSError if it cannot be started."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], hear: Hear, hear_errors: Hear, stdin: bytes = b""
    ) -> None:
        """`hear` gets each line of stdout, `hear_errors` each of stderr; `env` is added to this process's own."""
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            self._process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **env},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._listening = [
            asyncio.create_task(_listen(self._process.stdout, hear)),
            asyncio.create_task(_listen(self._process.stderr, hear_errors)),
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def terminate(self) -> None:
        self._process.terminate()

    async def wait(self) -> int:
        """Its exit code, once it has ended and all that it had said was heard."""
        code = await in_thread(self._process.wait)
        self._kill_group()  # what it left running would keep its pipes open
        await asyncio.wait(self._listening, timeout=LAST_WORDS)
        return code

    async def close(self) -> None:
        """Done to the end even for a caller that is cancelled meanwhile."""
        closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(closing)
        finally:
            await asyncio.wait([closing])

    async def _close(self) -> None:
        if not self.has_ended:
            self._kill_group()
        await self.wait()
        for task in self._listening:
            task.cancel()
        await asyncio.wait(self._listening)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Tail:
    """The last lines that were heard."""

    def __init__(self, size: int) -> None:
        self._lines: deque[str] = deque(maxlen=size)

    def add(self, line: str) -> None:
        if line.strip():
            self._lines.append(line.rstrip())

    def __str__(self) -> str:
        return "\n".join(self._lines)


def how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


async def _listen(pipe: IO[bytes], hear: Hear) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        async for line in _lines(reader):
            hear(line)
    finally:
        transport.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    rest = b""
    while chunk := await reader.read(CHUNK):
        *whole, rest = (rest + chunk).split(b"\n")
        rest = rest[:LONGEST_LINE]
        for line in whole:
            yield line[:LONGEST_LINE].decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
