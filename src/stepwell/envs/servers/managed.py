"""A session with a server that keeps the tokens of all its calls for training.

If the server returns ids (the gateway, vLLM), the sequences are exactly the tokens that were read and sampled. A
sequence goes on as long as the template keeps the history unchanged; otherwise the turn begins a new sequence. If the
server returns only text, the ids are encoded from it, and the sequence is marked as retokenized.

What the tokens are trained with must be known, so a call without a temperature or top_p asks for 1: a server's own
default may be another value.
"""

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
from stepwell.envs.servers.server import SamplingCalls, Server, ServerReply, Split
from stepwell.errors import BadRequest
from stepwell.steps.step import Exactness
from stepwell.wire.openai import Upstream, read_choices, read_object

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

ON_POLICY = {"temperature": 1.0, "top_p": 1.0}


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
