"""All servers of an environment: a call goes to the least busy server that can be reached, else to another one.

Each server has its own limits. Evaluations have a separate limit, so they never wait for training. While no server can
be reached, calls wait until one is back, at most for the timeout of a call.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers.managed import ManagedServer
from stepwell.envs.servers.retokenization import TokenizerCache
from stepwell.envs.servers.server import NO_REASONING, Server, ServerReply, Split, openai_package
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.wire.openai import Upstream

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

R = TypeVar("R")
MOST_TRIES = 8
"""Servers that one call may lose. If it loses more, the cause is not a restart."""


class ServerManager:
    """Whoever makes one closes it."""

    def __init__(self, configs: Sequence[APIServerConfig], reasoning: Mapping[str, Any] = NO_REASONING) -> None:
        if not configs:
            raise BadRequest("an environment needs a server to sample from")
        self.servers = [Server(config, reasoning) for config in configs]
        self._tokenizers = TokenizerCache()
        self._connection_error = openai_package().APIConnectionError
        self._timeout_error = openai_package().APITimeoutError

    async def chat_completion(self, *, split: Split = "train", **request: Any) -> "ChatCompletion":
        """As chat.completions.create of the openai package; `split="eval"` counts against the limit of evaluations."""
        reply: ChatCompletion = await self._call(lambda server: server.ask(Upstream.CHAT, request), split)
        return reply

    async def completion(self, *, split: Split = "train", **request: Any) -> "Completion":
        """As completions.create of the openai package."""
        reply: Completion = await self._call(lambda server: server.ask(Upstream.COMPLETIONS, request), split)
        return reply

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None) -> AsyncIterator[ManagedServer]:
        """A session that keeps the tokens of all its calls.

        The tokenizer decodes them, and encodes text if a server returns no ids. By default, the server's tokenizer is
        loaded when it is needed.
        """
        session = ManagedServer(self._ask_for_tokens, self._tokenizers, tokenizer)
        try:
            yield session
        finally:
            session.reset()

    def update_weight(self, weight: float) -> None:
        """Set the limits of concurrent calls to this share of the configured limits."""
        for server in self.servers:
            server.update_weight(weight)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def _ask_for_tokens(
        self, upstream: Upstream, request: dict[str, Any], split: Split, preferred: Server | None
    ) -> ServerReply:
        return await self._call(lambda server: server.ask_for_tokens(upstream, request), split, preferred)

    async def _call(self, ask: Callable[[Server], Awaitable[R]], split: Split, preferred: Server | None = None) -> R:
        for _ in range(MOST_TRIES):
            server = await self._choose(split, preferred)
            async with server.slots[split]:
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
            names = ", ".join(server.config.base_url for server in self.servers)
            raise EngineUnavailable(f"no server answered for {timeout:g} s: {names}")
