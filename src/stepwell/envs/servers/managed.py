"""A session with a server that keeps the tokens of all its calls for training.

If the server returns ids (the gateway, vLLM), the sequences are exactly the tokens that were read and sampled. A
sequence goes on as long as the template keeps the history unchanged; otherwise the turn begins a new sequence. If the
server returns only text, the ids are encoded from it, and the sequence is marked as retokenized.

What the tokens are trained with must be known, so a call without a temperature or top_p asks for 1: a server's own
default may be another value.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.envs.servers.retokenization import TokenizerCache, encoded_turn
from stepwell.envs.servers.sequences import SampledTurn, SequenceNode, TurnSequence, TurnTree, read_turn
from stepwell.envs.servers.server import Server, ServerReply, Split
from stepwell.errors import BadRequest
from stepwell.steps.step import Exactness
from stepwell.wire.openai import Upstream, read_choices, read_object

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

ON_POLICY = {"temperature": 1.0, "top_p": 1.0}
AskForTokens: TypeAlias = Callable[[Upstream, dict[str, Any], Split, Server | None], Awaitable[ServerReply]]


class ManagedServer:
    """Opened by ServerManager.managed_server. Its calls go to one server while that can be reached: it has the prefix
    cached."""

    def __init__(self, ask: AskForTokens, tokenizers: TokenizerCache, tokenizer: Any = None) -> None:
        self._ask = ask
        self._tokenizers = tokenizers
        self._tokenizer = tokenizer
        self._server: Server | None = None
        self._tree = TurnTree()

    async def chat_completion(self, *, split: Split = "train", **request: Any) -> "ChatCompletion":
        """As chat.completions.create of the openai package, without streaming."""
        reply: ChatCompletion = await self._call(Upstream.CHAT, request, split)
        return reply

    async def completion(self, *, split: Split = "train", **request: Any) -> "Completion":
        """As completions.create of the openai package, without streaming."""
        reply: Completion = await self._call(Upstream.COMPLETIONS, request, split)
        return reply

    def get_state(self) -> dict[str, list[SequenceNode]]:
        """`nodes`: the sequences so far, in the order in which they began; n choices are n sequences."""
        return {"nodes": [self._tree.node(sequence, self._text(sequence)) for sequence in self._tree.ends]}

    def reset(self) -> None:
        self._tree = TurnTree()

    async def _call(self, upstream: Upstream, request: dict[str, Any], split: Split) -> Any:
        if request.get("stream"):
            raise BadRequest("a managed session does not stream: leave stream out")
        request = {**ON_POLICY, **request}
        answered = await self._ask(upstream, request, split, self._server)
        self._server = answered.server
        for turn in await self._turns(answered, request):
            self._tree.add(turn)
        return answered.reply

    async def _turns(self, answered: ServerReply, request: dict[str, Any]) -> list[SampledTurn]:
        reply = read_object(answered.raw, "answer")
        choices = read_choices(reply)
        is_told = all("untrainable" in choice for choice in choices)  # the gateway knows its engine
        mode = "" if is_told or request.get("temperature") in (None, 1) else await answered.server.logprobs_mode()
        turns = [read_turn(reply, choice, request, mode) for choice in choices]
        if None in turns and self._tokenizer is None:
            config = answered.server.config
            self._tokenizer = await self._tokenizers.named(config.tokenizer_name or config.model_name)
        complete = [
            turn if turn is not None else await asyncio.to_thread(encoded_turn, self._tokenizer, request, choice, n)
            for n, (turn, choice) in enumerate(zip(turns, choices, strict=True))
        ]
        if any(turn.exactness is Exactness.RETOKENIZED for turn in complete):
            answered.server.warn_of_text()
        return complete

    def _text(self, sequence: TurnSequence) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(self._tree.tokens(sequence)))


class ManagedServerAdapter:
    """A session in the shape of an AsyncOpenAI client, for libraries that want one."""

    def __init__(self, managed_server: ManagedServer, base_url: str) -> None:
        self.base_url = base_url
        self.completions = SimpleNamespace(create=managed_server.completion)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=managed_server.chat_completion))
