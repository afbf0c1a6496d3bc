"""The servers that an environment samples from: Stepwell's gateway, or any server with OpenAI's API.

A call goes to the least busy server that can be reached, else to another one. Each server has its own limits.
Evaluations have a separate limit, so they never wait for training. While no server can be reached, calls wait until one
is back, at most for the timeout of a call.

A managed session keeps the tokens of all its calls for training:

- If the server returns ids (the gateway, vLLM), the sequences are exactly the tokens that were read and sampled. A
  sequence goes on as long as the template keeps the history unchanged; otherwise the turn begins a new sequence. If the
  server returns only text, the ids are encoded from it, and the sequence is marked as retokenized.
- What the tokens are trained with must be known, so a call without a temperature or top_p asks for 1: a server's own
  default may be another value.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from stepwell.envs.config import APIServerConfig, ServerBaseline, as_server_configs
from stepwell.envs.servers.sequences import (
    SampledTurn,
    SequenceNode,
    TokenizerCache,
    TurnSequence,
    TurnTree,
    encoded_turn,
    note_sampling,
    read_turn,
)
from stepwell.envs.servers.server import NO_REASONING, SamplingCalls, Server, ServerReply, Split, openai_package
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import Exactness
from stepwell.wire.openai import Upstream, read_choices, read_object

__all__ = ["ManagedServer", "ManagedServerAdapter", "SequenceNode", "ServerManager"]

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

R = TypeVar("R")
ON_POLICY = {"temperature": 1.0, "top_p": 1.0}
MOST_TRIES = 8
"""Servers that one call may lose. If it loses more, the cause is not a restart."""


class ManagedServer:
    """Opened by ServerManager.managed_server. Its calls go to one server while that can be reached: it has the prefix
    cached."""

    def __init__(
        self,
        server: SamplingCalls,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        *,
        tokenizers: TokenizerCache | None = None,
        **of_atropos: Any,
    ) -> None:
        """`track_tree`: get_state also has the sequences that a later turn has continued, by their text.
        `tool_parser`: tool calls are dictionaries. Other arguments of Atropos' class change nothing."""
        self._calls = server
        self._tokenizers = tokenizers or TokenizerCache()
        self._tokenizer = tokenizer
        self._track_tree = track_tree
        self._has_tool_parser = tool_parser is not None
        self._server: Server | None = None
        self._tree = TurnTree()

    async def chat_completion(self, *, split: Split = "train", **request: Any) -> "ChatCompletion":
        """Takes the arguments of chat.completions.create of the openai package, without streaming."""
        reply: ChatCompletion = await self._call(Upstream.CHAT, request, split)
        if self._has_tool_parser:
            for choice in reply.choices:
                calls: Any = choice.message.tool_calls
                choice.message.tool_calls = [call.model_dump() for call in calls] if calls else calls
        return reply

    async def completion(self, *, split: Split = "train", **request: Any) -> "Completion":
        """Takes the arguments of completions.create of the openai package, without streaming."""
        reply: Completion = await self._call(Upstream.COMPLETIONS, request, split)
        return reply

    def get_state(self) -> dict[str, Any]:
        """`nodes`: the sequences so far, in the order in which they began; n choices are n sequences. With track_tree,
        `sequences` and `tree`: every sequence by its text."""
        if not self._track_tree:
            return {"nodes": [self._node(sequence) for sequence in self._tree.ends]}
        nodes = {node.full_text: node for node in map(self._node, self._tree.sequences)}
        return {"sequences": nodes, "tree": nodes}

    async def get_logprobs(self, **request: Any) -> dict[str, Any]:
        """Asks the server for log-probabilities."""
        return await self._calls.get_logprobs(**request)

    def reset(self) -> None:
        self._tree = TurnTree()

    async def _call(self, upstream: Upstream, request: dict[str, Any], split: Split) -> Any:
        if request.get("stream"):
            raise BadRequest("a managed session does not stream: leave stream out")
        request = {**ON_POLICY, **request}
        answered = await self._calls.ask_for_tokens(upstream, request, split, self._server)
        self._server = answered.server
        turns = await self._turns(answered, request)
        for turn in turns:
            self._tree.add(turn)
        if split == "train":
            note_sampling((turn.temperature, turn.untrainable) for turn in turns)
        return answered.reply

    async def _turns(self, answered: ServerReply, request: dict[str, Any]) -> list[SampledTurn]:
        reply = read_object(answered.raw, "answer")
        choices = read_choices(reply)
        mode = await answered.server.mode_of(choices, request)
        turns = [read_turn(reply, choice, request, mode) for choice in choices]
        if (None in turns or self._track_tree) and self._tokenizer is None:
            config = answered.server.config
            self._tokenizer = await self._tokenizers.named(config.tokenizer_name or config.model_name)
        complete = [
            turn if turn is not None else await asyncio.to_thread(encoded_turn, self._tokenizer, request, choice, n)
            for n, (turn, choice) in enumerate(zip(turns, choices, strict=True))
        ]
        if any(turn.exactness is Exactness.RETOKENIZED for turn in complete):
            answered.server.warn_of_text()
        return complete

    def _node(self, sequence: TurnSequence) -> SequenceNode:
        decode = self._tokenizer.decode if self._tokenizer is not None else lambda _: ""
        return self._tree.node(sequence, str(decode(self._tree.tokens(sequence))))


class ManagedServerAdapter:
    """A session in the shape of an AsyncOpenAI client, for libraries that want one."""

    def __init__(self, managed_server: ManagedServer, base_url: str) -> None:
        self.base_url = base_url
        self.completions = SimpleNamespace(create=managed_server.completion)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=managed_server.chat_completion))


log = logging.getLogger("stepwell.envs")


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
