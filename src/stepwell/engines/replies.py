"""An engine's answer on its way: its head is there, its body comes as it is read."""

from dataclasses import dataclass

import aiohttp

from stepwell.engines.engine import BROKEN, explained
from stepwell.engines.replica import EngineReplica
from stepwell.errors import EngineUnavailable


@dataclass(frozen=True, slots=True)
class RefusedReply:
    """An answer read to its end."""

    status: int
    body: bytes


class EngineReply:
    """Whoever gets one closes it. Closing it before its end drops the connection, which frees the engine."""

    __slots__ = ("_answer", "_is_open", "content_type", "engine", "status", "version_before")

    def __init__(self, engine: EngineReplica, answer: aiohttp.ClientResponse, version_before: int | None) -> None:
        self.engine = engine
        self.version_before = version_before
        """The engine's policy version, as known when the call was sent: no token is older."""
        self.status = answer.status
        self.content_type = answer.headers.get("Content-Type", "")
        self._answer = answer
        self._is_open = True
        engine.in_flight += 1

    async def read(self) -> bytes:
        """The whole body."""
        try:
            return await self._answer.read()
        except BROKEN as failure:
            raise self._broken(failure) from None
        finally:
            self.close()

    async def next_bytes(self) -> bytes:
        """What has arrived since the last time, at least a byte; nothing at the end."""
        try:
            data = await self._answer.content.readany()
        except BROKEN as failure:
            self.close()
            raise self._broken(failure) from None
        if not data:
            self.close()
        return data

    @property
    def is_read(self) -> bool:
        """To its end: its connection can be used again."""
        return self._answer.content.at_eof()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.engine.in_flight -= 1
            self._answer.close()

    def _broken(self, failure: Exception) -> EngineUnavailable:
        return EngineUnavailable(f"{self._answer.url} broke off in its answer: {explained(failure)}")
