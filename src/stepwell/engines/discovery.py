"""Engines that DNS lists: all addresses of a name, as a headless service of Kubernetes has one for each ready pod.

- A name is looked up again and again. Engines that are new join the pool's list, and so all gateways and trainers.
- An engine leaves when the name no longer lists it in several lookups one after the other.
- A lookup that fails, or lists nothing, changes nothing: DNS being away is no reason to take engines from agents.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

from stepwell.engines.fleet import EngineFleet
from stepwell.errors import BadRequest, PoolUnavailable, StepwellError

log = logging.getLogger("stepwell.engines")

INTERVAL = 5.0
"""Seconds between two lookups of a name."""
LOOKUP_TIMEOUT = 10.0
MISSING_LOOKUPS = 3
"""A restarting pod is out of its service for a moment; its engine needs not leave for that."""

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
                listed = {self._address(ip) for ip in await self._lookup(self._host, self._port)}
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

    def _address(self, ip: str) -> str:
        return f"http://[{ip}]:{self._port}" if ":" in ip else f"http://{ip}:{self._port}"

    def _note_failure(self, why: str) -> None:
        if why != self._failure:
            self._failure = why
            log.warning("%s cannot be looked up, so its engines stay as they are: %s", self._name, why)
