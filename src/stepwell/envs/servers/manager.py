"""All servers of an environment: a call goes to the least busy server that can be reached, else to another one.

Each server has its own limits. Evaluations have a separate limit, so they never wait for training. While no server can
be reached, calls wait until one is back, at most for the timeout of a call.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from stepwell.envs.config import APIServerConfig, ServerBaseline, as_server_configs
from stepwell.envs.servers import ManagedServer
from stepwell.envs.servers.sequences import TokenizerCache
from stepwell.envs.servers.server import NO_REASONING, SamplingCalls, Server, Split, openai_package
from stepwell.errors import BadRequest, EngineUnavailable

log = logging.getLogger("stepwell.envs")

R = TypeVar("R")
MOST_TRIES = 8
"""Servers that one call may lose. If it loses more, the cause is not a restart."""


class ServerManager(SamplingCalls):
    """Whoever makes one closes it."""

    def __init__(
        self,
        configs: ServerBaseline | Sequence[APIServerConfig],
        reasoning: Mapping[str, Any] = NO_REASONING,
        tool_parser: str | None = None,
        **of_atropos: Any,
    ) -> None:
        """With a `tool_parser`, tool calls in sessions are dictionaries, as in Atropos; the server parses them.
        `of_atropos` are other arguments of Atropos' class. They change nothing, and the log names them."""
        if not configs:
            raise BadRequest("an environment needs a server to sample from")
        for name in (name for name, value in of_atropos.items() if value):
            log.warning("ServerManager: %s changes nothing here", name)
        self.servers = [Server(config, reasoning) for config in as_server_configs(configs)]
        self.tool_parser = tool_parser
        self._tokenizers = TokenizerCache()
        self._connection_error = openai_package().APIConnectionError
        self._timeout_error = openai_package().APITimeoutError

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, **of_atropos: Any) -> AsyncIterator[ManagedServer]:
        """A session that keeps the tokens of all its calls.

        The tokenizer decodes them, and encodes text if a server returns no ids. By default, the server's tokenizer is
        loaded when it is needed. Other arguments of Atropos' method change nothing.
        """
        session = ManagedServer(self, tokenizer, tool_parser=self.tool_parser, tokenizers=self._tokenizers)
        try:
            yield session
        finally:
            session.reset()

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[Server]:
        """The least busy server. Each of its calls counts against its limits."""
        yield await self._choose("train", None)

    def update_weight(self, weight: float) -> None:
        """Set the limits of concurrent calls to this share of the configured limits."""
        for server in self.servers:
            server.update_weight(weight)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def call(self, ask: Callable[[Server], Awaitable[R]], split: Split, preferred: Server | None = None) -> R:
        for _ in range(MOST_TRIES):
            server = await self._choose(split, preferred)
            async with server.slot(split):
                try:
                    return await ask(server)
                except self._connection_error as failure:
                    if isinstance(failure, self._timeout_error) or not server.config.health_check:
                        raise
                    server.set_down(failure.__cause__ or failure)
        raise EngineUnavailable(f"the call failed {MOST_TRIES} times because its server became unreachable")

    async def _choose(self, split: Split, preferred: Server | None) -> Server:
        if preferred is not None and preferred.up.is_set():
            return preferred
        if not any(server.up.is_set() for server in self.servers):
            await self._wait_for_any()
        reachable = [server for server in self.servers if server.up.is_set()]
        return min(reachable, key=lambda server: server.load(split))

    async def _wait_for_any(self) -> None:
        waits = [asyncio.create_task(server.up.wait()) for server in self.servers]
        timeout = max(server.config.timeout for server in self.servers)
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            names = ", ".join(server.url for server in self.servers)
            raise EngineUnavailable(f"no server answered for {timeout:g} s: {names}")
