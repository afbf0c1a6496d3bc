"""A session with a server that keeps the tokens of all its calls, ready to be trained on.

Where the server gives ids (the gateway, vLLM) the sequences are token for token what was read and sampled, over as many
turns as the template keeps the history as it was; a turn before which it did not begins a sequence of its own. Where
the server gives text only, the ids are encoded again, and the sequence says so.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.envs.servers.answers import read_turn
from stepwell.envs.servers.node import SequenceNode, node_of, tokens_of
from stepwell.envs.servers.retokenization import TokenizerCache, encoded_turn
from stepwell.envs.servers.sequences import Line, Lines, Turn
from stepwell.envs.servers.server import Answered, Server, Split
from stepwell.errors import BadRequest
from stepwell.steps.step import Exactness
from stepwell.wire.openai import Upstream, read_choices, read_object

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

AskForTokens: TypeAlias = Callable[[Upstream, dict[str, Any], Split, Server | None], Awaitable[Answered]]


class ManagedServer:
    """Opened by ServerManager.managed_server. Its calls go to one server while that is well: it has the prefix."""

    def __init__(self, ask: AskForTokens, tokenizers: TokenizerCache, tokenizer: Any = None) -> None:
        self._ask = ask
        self._tokenizers = tokenizers
        self._tokenizer = tokenizer
        self._server: Server | None = None
        self._lines = Lines()

    async def chat_completion(self, *, split: Split = "train", **wanted: Any) -> "ChatCompletion":
        """As the openai package's chat.completions.create, unstreamed."""
        reply: ChatCompletion = await self._kept(Upstream.CHAT, wanted, split)
        return reply

    async def completion(self, *, split: Split = "train", **wanted: Any) -> "Completion":
        """As the openai package's completions.create, unstreamed."""
        reply: Completion = await self._kept(Upstream.COMPLETIONS, wanted, split)
        return reply

    def get_state(self) -> dict[str, list[SequenceNode]]:
        """`nodes`: the sequences so far, in the order in which they were begun; n choices are n of them."""
        return {"nodes": [node_of(line, self._text(line)) for line in self._lines.ends]}

    def reset(self) -> None:
        self._lines.clear()

    async def _kept(self, upstream: Upstream, wanted: dict[str, Any], split: Split) -> Any:
        if wanted.get("stream"):
            raise BadRequest("a managed session's answers come whole: leave stream out")
        answered = await self._ask(upstream, wanted, split, self._server)
        self._server = answered.server
        self._lines.add(await self._turns(answered, wanted))
        return answered.reply

    async def _turns(self, answered: Answered, wanted: dict[str, Any]) -> list[Turn]:
        reply = read_object(answered.raw, "answer")
        choices = read_choices(reply)
        turns = [read_turn(reply, choice) for choice in choices]
        if None in turns:
            await self._load_tokenizer(answered.server)
        whole = [
            turn if turn is not None else await asyncio.to_thread(encoded_turn, self._tokenizer, wanted, choice, place)
            for place, (turn, choice) in enumerate(zip(turns, choices, strict=True))
        ]
        if any(turn.exactness is Exactness.RETOKENIZED for turn in whole):
            answered.server.warn_of_text()
        return whole

    async def _load_tokenizer(self, server: Server) -> None:
        if self._tokenizer is None:
            self._tokenizer = await self._tokenizers.named(server.config.tokenizer_name or server.config.model_name)

    def _text(self, line: Line) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(tokens_of(line)))
