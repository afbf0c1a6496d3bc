"""How the processes of a gateway learn of engines and their states: from DNS, and from one watcher of the machine.

- DNS lists all addresses of a name, as a headless service of Kubernetes has one for each ready pod. A name is looked up
  again and again. Engines that are new join the pool's list, and so all gateways and trainers.
- An engine leaves when the name no longer lists it in several lookups one after the other.
- A lookup that fails, or lists nothing, changes nothing: DNS being away is no reason to take engines from agents.
- The gateway processes of a machine share a socket file, so that engines are not asked by each of them. One that gets
  the lock beside it watches the engines and tells the others what it sees; when it ends, another one gets the lock. A
  process that hears nothing watches for itself.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import orjson

from stepwell.common.async_calls import running
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReport
from stepwell.errors import BadRequest, PoolUnavailable, StepwellError

log = logging.getLogger("stepwell.engines")
INTERVAL = 5.0
"""Seconds between two lookups of a name."""
LOOKUP_TIMEOUT = 10.0
MISSING_LOOKUPS = 3
"""A restarting pod is out of its service for a moment; its engine needs not leave for that."""
TELL_INTERVAL = 0.5
"""Seconds between two tellings if no state changes, which also carry the newest versions."""
SILENCE = 3.0
"""Seconds without a telling after which a process watches for itself."""
RETRY_PAUSE = 0.1
LONGEST_LINE = 16 * 2**20
Lookup: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""The IP addresses of a host."""


async def look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class EngineDiscovery:
    """The engines of one `dns://host:port`."""

    def __init__(
        self, name: str, engines: EngineFleet, *, lookup: Lookup = look_up, interval: float = INTERVAL
    ) -> None:
        parts = urlsplit(name)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._name = name
        self._engines = engines
        self._lookup = lookup
        self._interval = interval
        self._missing: dict[str, int] = {}
        """The number of lookups since the name last listed an engine, by engine."""
        self._failure = ""

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                found = await self._lookup(self._host, self._port)
                listed = {f"http://{f'[{ip}]' if ':' in ip else ip}:{self._port}" for ip in found}
            if not listed:
                self._note_failure("it lists no address")
                return
            await self._change(listed)
        except (OSError, TimeoutError, StepwellError) as failure:
            self._note_failure(str(failure) or f"no answer within {LOOKUP_TIMEOUT:g} s")
        else:
            self._failure = ""

    async def _change(self, listed: set[str]) -> None:
        for address in sorted(listed - self._missing.keys()):
            try:
                await self._engines.join(address)
            except PoolUnavailable:  # agents need it now; the next lookup tells the pool
                await self._engines.add(address)
                raise
            self._missing[address] = 0
            log.info("%s lists a new engine: %s", self._name, address)
        for address in self._missing:
            self._missing[address] = 0 if address in listed else self._missing[address] + 1
        for address in [address for address, lookups in self._missing.items() if lookups >= MISSING_LOOKUPS]:
            with contextlib.suppress(BadRequest):  # another gateway was faster
                await self._engines.leave(address)
            del self._missing[address]
            log.info("%s does not list %s any more: it gets no new calls", self._name, address)

    def _note_failure(self, why: str) -> None:
        if why != self._failure:
            self._failure = why
            log.warning("%s cannot be looked up, so its engines stay as they are: %s", self._name, why)


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
