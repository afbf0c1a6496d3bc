"""One watcher for all gateway processes of a machine, so that engines are not asked by each of them.

The processes share a socket file. One that gets the lock beside it watches the engines and tells the others what it
sees; when it ends, another one gets the lock. A process that hears nothing watches for itself.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orjson

from stepwell.common.async_calls import running
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReport

TELL_INTERVAL = 0.5
"""Seconds between two tellings if no state changes, which also carry the newest versions."""
SILENCE = 3.0
"""Seconds without a telling after which a process watches for itself."""
RETRY_PAUSE = 0.1
LONGEST_LINE = 16 * 2**20


class SharedWatch:
    """Takes the place of `EngineFleet.watch` in each of several processes."""

    def __init__(self, path: Path, fleet: EngineFleet) -> None:
        """`path` is the socket file, in a folder that no other user can write."""
        self.is_watching = False
        """Whether this process asks the engines."""
        self._path = path
        self._fleet = fleet
        self._followers: set[asyncio.StreamWriter] = set()

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            with _locked(self._path.with_suffix(".lock")) as is_first:
                if is_first:
                    await self._lead()
            with contextlib.suppress(OSError):
                await self._follow()
            await asyncio.sleep(RETRY_PAUSE)

    async def _lead(self) -> None:
        self._path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._tell_one, self._path)
        try:
            async with self._watching():
                while True:
                    self._tell_all()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._fleet.changed(), TELL_INTERVAL)
        finally:
            server.close()
            for follower in self._followers:
                follower.close()

    async def _tell_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._followers.add(writer)
        try:
            self._tell_all()
            await reader.read()
        except OSError:
            return
        finally:
            self._followers.discard(writer)
            writer.close()

    def _tell_all(self) -> None:
        line = orjson.dumps([engine.report() for engine in self._fleet.replicas], default=list) + b"\n"
        for follower in self._followers:
            follower.write(line)

    async def _follow(self) -> None:
        """Follows the watcher until it ends."""
        reader, writer = await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE)
        try:
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), SILENCE)
                except TimeoutError:
                    async with self._watching():
                        line = await reader.readline()
                if not line:
                    return
                self._take(line)
        finally:
            writer.close()

    def _take(self, line: bytes) -> None:
        reports = {report["address"]: report for report in orjson.loads(line)}
        for engine in self._fleet.replicas:
            if report := reports.get(engine.address):
                engine.take(EngineReport.read(report))

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        self.is_watching = True
        try:
            async with running(self._fleet.watch()):
                yield
        finally:
            self.is_watching = False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process has the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(file)
