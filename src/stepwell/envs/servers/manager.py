"""The servers as one: a call goes to the least busy that is well, and to another where one cannot be reached.

Bounds are each server's own, and evaluations have one to themselves, so that they never wait behind training. While no
server can be reached, calls wait until one is back, as long as a call may take.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers.managed import ManagedServer
from stepwell.envs.servers.retokenization import TokenizerCache
from stepwell.envs.servers.server import Answered, Server, Split, openai_package
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.wire.openai import Upstream

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

R = TypeVar("R")
MOST_TRIES = 8
"""How often one call may find its server gone; beyond it, something else is wrong than a restart."""


class ServerManager:
    """Whoever makes one closes it."""

    def __init__(self, configs: Sequence[APIServerConfig]) -> None:
        if not configs:
            raise BadRequest("an environment needs a server to sample from")
        self.servers = [Server(config) for config in configs]
        self._tokenizers = TokenizerCache()
        self._unreached = openai_package().APIConnectionError
        self._timed_out = openai_package().APITimeoutError

    async def chat_completion(self, *, split: Split = "train", **wanted: Any) -> "ChatCompletion":
        """As the openai package's chat.completions.create; `split="eval"` counts against the evaluations' bound."""
        reply: ChatCompletion = await self._reached(lambda server: server.ask(Upstream.CHAT, wanted), split)
        return reply

    async def completion(self, *, split: Split = "train", **wanted: Any) -> "Completion":
        """As the openai package's completions.create."""
        reply: Completion = await self._reached(lambda server: server.ask(Upstream.COMPLETIONS, wanted), split)
        return reply

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None) -> AsyncIterator[ManagedServer]:
        """A session that keeps the tokens of all its calls.

        The tokenizer makes text of them, and ids of text where a server gives none; without one, that of the server is
        loaded if need be.
        """
        session = ManagedServer(self._ask_for_tokens, self._tokenizers, tokenizer)
        try:
            yield session
        finally:
            session.reset()

    def update_weight(self, weight: float) -> None:
        """Change how many calls may be under way at once, as a share of what is configured."""
        for server in self.servers:
            server.update_weight(weight)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def _ask_for_tokens(
        self, upstream: Upstream, wanted: dict[str, Any], split: Split, preferred: Server | None
    ) -> Answered:
        return await self._reached(lambda server: server.ask_for_tokens(upstream, wanted), split, preferred)

    async def _reached(self, ask: Callable[[Server], Awaitable[R]], split: Split, preferred: Server | None = None) -> R:
        for _ in range(MOST_TRIES):
            server = await self._next(split, preferred)
            async with server.slots[split]:
                try:
                    return await ask(server)
                except self._unreached as failure:
                    if isinstance(failure, self._timed_out) or not server.config.health_check:
                        raise
                    server.set_down(failure.__cause__ or failure)
        raise EngineUnavailable(f"{MOST_TRIES} times a server went away under this call")

    async def _next(self, split: Split, preferred: Server | None) -> Server:
        if preferred is not None and preferred.up.is_set():
            return preferred
        if not any(server.up.is_set() for server in self.servers):
            await self._until_one_is_back()
        well = [server for server in self.servers if server.up.is_set()]
        return min(well, key=lambda server: server.slots[split].load)

    async def _until_one_is_back(self) -> None:
        waits = [asyncio.create_task(server.up.wait()) for server in self.servers]
        patience = max(server.config.timeout for server in self.servers)
        try:
            done, _ = await asyncio.wait(waits, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            names = ", ".join(server.config.base_url for server in self.servers)
            raise EngineUnavailable(f"no server answered for {patience:g} s: {names}")
