"""The vLLM servers, as one: calls go to them in turn, past those that cannot be reached.

Only the paths written here are ever called, at addresses that come from the settings alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

from stepwell.core.routing import RoundRobin
from stepwell.core.step import JsonObject
from stepwell.errors import EngineUnavailable
from stepwell.wire.generate import Generated, completions_body, generate_body, read_generated, read_model_name

CONNECT_TIMEOUT = 5.0
ANSWER_TIMEOUT = 600.0
"""Seconds a whole answer may take."""
CHECK_TIMEOUT = 2.0
CLOSED = (403, 404)
"""How vLLM answers at its generate endpoint when that was not enabled."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    status: int
    body: bytes


class Engines:
    """Open it with `async with`: its connections belong to one event loop."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._turns = RoundRobin(self.addresses)
        self._without_generate: set[str] = set()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT, sock_connect=CONNECT_TIMEOUT)
        headers = {"Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def chat(self, body: bytes) -> EngineAnswer:
        return await self._in_turn(lambda address: self._send(address, "/v1/chat/completions", body))

    async def models(self) -> EngineAnswer:
        return await self._in_turn(lambda address: self._send(address, "/v1/models", None))

    async def generate(self, prompt_ids: Sequence[int], sampling: JsonObject) -> Generated | EngineAnswer:
        """The generation, or the engine's own answer where it refused."""
        answer = await self._in_turn(lambda address: self._generate_at(address, prompt_ids, sampling))
        return read_generated(answer.body, prompt_ids) if answer.status == 200 else answer

    async def unreachable(self) -> dict[str, str]:
        """The engines that do not answer now, each with the reason."""
        answers = await asyncio.gather(*(self._why_unreachable(address) for address in self.addresses))
        return {address: why for address, why in zip(self.addresses, answers, strict=True) if why is not None}

    async def _generate_at(self, address: str, prompt_ids: Sequence[int], sampling: JsonObject) -> EngineAnswer:
        if address not in self._without_generate:
            answer = await self._send(address, "/inference/v1/generate", generate_body(prompt_ids, sampling))
            if answer.status not in CLOSED:
                return answer
            self._without_generate.add(address)
        models = await self._send(address, "/v1/models", None)
        body = completions_body(read_model_name(models.body), prompt_ids, sampling)
        return await self._send(address, "/v1/completions", body)

    async def _in_turn(self, call: Callable[[str], Awaitable[EngineAnswer]]) -> EngineAnswer:
        failures: list[str] = []
        for address in self._turns.order():
            try:
                return await call(address)
            except aiohttp.ClientConnectorError as failure:
                failures.append(f"{address}: {failure}")
        raise EngineUnavailable("no engine can be reached: " + "; ".join(failures))

    async def _send(self, address: str, path: str, body: bytes | None) -> EngineAnswer:
        """One request. A server that was never reached raises ClientConnectorError: then another may be tried."""
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, address + path, data=body) as answer:
                return EngineAnswer(answer.status, await answer.read())
        except aiohttp.ClientConnectorError:
            raise
        except TimeoutError:
            raise EngineUnavailable(f"{address}{path} did not answer within {ANSWER_TIMEOUT:g} s") from None
        except aiohttp.ClientError as failure:
            raise EngineUnavailable(f"{address}{path} broke off: {failure or type(failure).__name__}") from None

    async def _why_unreachable(self, address: str) -> str | None:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                answer = await self._send(address, "/health", None)
        except TimeoutError:
            return f"no answer within {CHECK_TIMEOUT:g} s"
        except (aiohttp.ClientError, EngineUnavailable) as failure:
            return str(failure)
        return None if answer.status == 200 else f"/health answers {answer.status}"
