"""An engine's reply: its head has arrived, its body is read as it comes."""

from dataclasses import dataclass

from stepwell.engines.connections import HttpReply
from stepwell.engines.engine import BROKEN, failure_text
from stepwell.engines.replica import EngineReplica
from stepwell.errors import EngineUnavailable


@dataclass(frozen=True, slots=True)
class RefusedReply:
    """An engine's refusal, as it wrote it."""

    status: int
    body: bytes


class EngineReply:
    """Must be closed. Closing it before its end drops the connection, which frees the engine."""

    __slots__ = ("_is_open", "_response", "engine", "status", "version_before")

    def __init__(self, engine: EngineReplica, response: HttpReply, version_before: int | None) -> None:
        self.engine = engine
        self.version_before = version_before
        """The engine's policy version, as known when the call was sent: no token is older."""
        self.status = response.status
        self._response = response
        self._is_open = True
        engine.in_flight += 1

    async def read(self) -> bytes:
        """The whole body."""
        try:
            return await self._response.read()
        except BROKEN as failure:
            raise self._broken(failure) from None
        finally:
            self.close()

    async def next_bytes(self) -> bytes:
        """The bytes that have arrived since the last time, at least one; empty at the end."""
        try:
            data = await self._response.next_bytes()
        except BROKEN as failure:
            self.close()
            raise self._broken(failure) from None
        if not data:
            self.close()
        return data

    async def version(self) -> int | None:
        """The policy version of all tokens of a broken answer; None if there are several, or the engine tells none."""
        after = await self.engine.version_after()
        if self.engine.has_unknown_weights:
            raise EngineUnavailable(f"{self._response.url} broke off in its answer, and nobody knows its weights")
        return self.version_before if after == self.version_before else None

    @property
    def is_read(self) -> bool:
        """Whether the reply is read to its end, so its connection can be used again."""
        return self._response.is_read

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.engine.in_flight -= 1
            self._response.close()

    def _broken(self, failure: Exception) -> EngineUnavailable:
        return EngineUnavailable(f"{self._response.url} broke off in its answer: {failure_text(failure)}")
