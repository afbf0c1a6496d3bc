"""The engines, as one: a call goes to one of them, and to another where it got no answer at all.

Only addresses that were configured or added are ever called, at paths that the gateway itself writes; redirects are
not followed. An answer that has begun is never asked for again.
"""

import asyncio
import contextlib
import io
import resource
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeAlias

import aiohttp

from stepwell.engines.engine import ANSWER_TIMEOUT, EngineFacts, EngineProbe, explained
from stepwell.engines.replica import EngineReplica, EngineView
from stepwell.engines.replies import EngineReply, RefusedReply
from stepwell.engines.routing import routing_named
from stepwell.engines.selection import EngineSelector
from stepwell.engines.vllm_generate import (
    COMPLETIONS,
    GENERATE,
    Generated,
    completions_body,
    generate_body,
    read_generated,
)
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import JsonObject

CONNECT_TIMEOUT = 30.0
"""Seconds. The watch finds out sooner that an engine is gone; a crowd of thousands may take this long to connect."""
SILENCE_TIMEOUT = 600.0
"""Seconds an engine may be silent, before its answer or within it. A whole answer may take as long as it likes."""
KEEP_ALIVE = 4.0
"""Seconds a connection is kept for the next call; vLLM closes its own after 5."""
FEWEST_CONNECTIONS = 256
LARGE_BODY = 2**20
NO_ENGINE_BEHIND = (502, 503, 504)
"""The statuses of a server that has no engine to ask just now."""
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
HUNG_UP = (aiohttp.ClientConnectionError, OSError)
"""Raised before the head of an answer is there; UNREACHED and timeouts are told apart first."""

Ask: TypeAlias = Callable[[EngineFacts], tuple[str, bytes | None]]
"""A request's path and body (None: a GET), for an engine with those facts."""


class EngineFleet:
    """Open it with `async with`: its connections belong to one event loop. Someone must run `watch`."""

    def __init__(self, addresses: Sequence[str], *, routing: str = "round_robin", api_key: str | None = None) -> None:
        self._fleet = EngineSelector(routing_named(routing))
        self._configured = tuple(addresses)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=_connections_limit(), keepalive_timeout=KEEP_ALIVE)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=SILENCE_TIMEOUT)
        self._calls = self._session(timeout, connector)
        self._questions = self._session(aiohttp.ClientTimeout(total=ANSWER_TIMEOUT), aiohttp.TCPConnector())
        await asyncio.gather(*(self.add(address) for address in self._configured))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._fleet.engines:
            engine.close()
        await self._calls.close()
        await self._questions.close()

    async def send(self, path: str, body: Callable[[EngineFacts], bytes], *, sticky: str = "") -> EngineReply:
        """The answer of one engine, as soon as its head is there. Waits while all engines are paused."""
        return await self._send(lambda facts: (path, body(facts)), sticky)

    async def models(self) -> RefusedReply:
        reply = await self._send(lambda _: ("/v1/models", None), "")
        return RefusedReply(reply.status, await reply.read())

    async def generate(self, prompt_ids: Sequence[int], sampling: JsonObject) -> Generated | RefusedReply:
        """The generation, or the engine's own answer where it refused."""
        reply = await self._send(lambda facts: _generation(facts, prompt_ids, sampling), "")
        body = await reply.read()
        if reply.status != 200:
            return RefusedReply(reply.status, body)
        return read_generated(body, prompt_ids, reply.engine.facts.model)

    async def version_after(self, engine: EngineReplica) -> int | None:
        """The engine's version as told by a request that began after this call; None where it cannot tell."""
        return await engine.version_after()

    async def add(self, address: str) -> None:
        """Once it is probed, or known to be down. One that is there already stays as it is."""
        if not address.startswith(("http://", "https://")):
            raise BadRequest(f"{address!r} is no address; write http://host:port")
        address = address.rstrip("/")
        if any(engine.address == address for engine in self._fleet.engines):
            return
        engine = EngineReplica(address, EngineProbe(self._questions, address), self._fleet.note_change)
        self._fleet.add(engine)
        await engine.check()

    async def remove(self, address: str) -> None:
        """It gets no new calls; those in flight there go on to their end."""
        address = address.rstrip("/")
        for engine in self._fleet.engines:
            if engine.address == address:
                return self._fleet.remove(engine)
        raise BadRequest(f"there is no engine {address}")

    def states(self) -> list[EngineView]:
        return [engine.view() for engine in self._fleet.engines]

    async def watch(self) -> None:
        """Keep every engine's state up to date, also of those that come later, until cancelled."""
        watches: dict[EngineReplica, asyncio.Task[None]] = {}
        try:
            while True:
                for engine in self._fleet.engines:
                    if engine not in watches:
                        watches[engine] = asyncio.create_task(engine.watch())
                for engine in watches.keys() - set(self._fleet.engines):
                    watches.pop(engine).cancel()
                await self._fleet.changed()
        finally:
            for watch in watches.values():
                watch.cancel()

    async def _send(self, ask: Ask, sticky: str) -> EngineReply:
        failures: dict[EngineReplica, str] = {}
        while (engine := await self._fleet.next(sticky, failures)) is not None:
            if not engine.probed:
                await engine.check()
                if not engine.probed:
                    failures[engine] = engine.why
                continue
            reply = await self._try(engine, ask)
            if isinstance(reply, EngineReply):
                return reply
            failures[engine] = reply
        reasons = "; ".join(f"{engine.address}: {why}" for engine, why in failures.items())
        raise EngineUnavailable(f"no engine answers: {reasons or 'there is none'}")

    async def _try(self, engine: EngineReplica, ask: Ask) -> EngineReply | str:
        """The reply; or why there is none, where another engine may be asked."""
        path, body = ask(engine.facts)
        version = engine.version
        method = "GET" if body is None else "POST"
        engine.in_flight += 1
        try:
            answer = await self._calls.request(method, engine.url(path), data=_payload(body), allow_redirects=False)
            if answer.status not in NO_ENGINE_BEHIND:
                return EngineReply(engine, answer, version)
            answer.close()
            return f"answers {answer.status}"
        except UNREACHED as failure:
            engine.set_down(explained(failure))
            return engine.why
        except TimeoutError:
            why = f"{engine.address}{path} was silent for {SILENCE_TIMEOUT:g} s"
            raise EngineUnavailable(why) from None
        except HUNG_UP as failure:
            return explained(failure)
        except aiohttp.ClientError as failure:
            raise EngineUnavailable(f"{engine.address}{path} cannot be read: {explained(failure)}") from None
        finally:
            engine.in_flight -= 1

    def _session(self, timeout: aiohttp.ClientTimeout, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        jar = aiohttp.DummyCookieJar()
        return aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers, cookie_jar=jar)


def _generation(facts: EngineFacts, prompt_ids: Sequence[int], sampling: JsonObject) -> tuple[str, bytes]:
    if facts.generate:
        return GENERATE, generate_body(prompt_ids, sampling)
    if facts.token_ids:
        return COMPLETIONS, completions_body(facts.model, prompt_ids, sampling)
    raise EngineUnavailable("a plain OpenAI server gives no token ids: only vLLM can generate from tokens")


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """A large body goes out piece by piece, so that other calls pass in between."""
    return body if body is None or len(body) < LARGE_BODY else io.BytesIO(body)


def _connections_limit() -> int:
    """An eighth of the files that may be open: most are for the agents, of whom many may wait for one engine."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(FEWEST_CONNECTIONS, files // 8)
