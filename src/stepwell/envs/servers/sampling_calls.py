"""The calls that an environment samples with. One server and the manager of several servers have the same ones."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from stepwell.envs.servers.asked_sampling import note_sampling
from stepwell.envs.servers.sequences import asked_sampling, read_turn
from stepwell.errors import BadRequest
from stepwell.wire.openai import Upstream, read_choices, read_object

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from stepwell.envs.servers.server import Server, ServerReply

R = TypeVar("R")
Split: TypeAlias = Literal["train", "eval"]
TokensAndLogprobs: TypeAlias = tuple[list[int], list[list[int]], list[list[float]], list[str]]


class SamplingCalls(ABC):
    @abstractmethod
    async def call(self, ask: "Callable[[Server], Awaitable[R]]", split: Split, preferred: "Server | None" = None) -> R:
        """The result of `ask` for a server that can be reached, within its limit of concurrent calls."""

    async def chat_completion(self, *, split: Split = "train", **request: Any) -> "ChatCompletion":
        """As chat.completions.create of the openai package; `split="eval"` counts against the limit of evaluations."""
        reply: ChatCompletion = await self._ask(Upstream.CHAT, request, split)
        return reply

    async def completion(self, *, split: Split = "train", **request: Any) -> "Completion":
        """As completions.create of the openai package."""
        reply: Completion = await self._ask(Upstream.COMPLETIONS, request, split)
        return reply

    async def tokens_and_logprobs_completion(self, *, split: Split = "train", **request: Any) -> TokensAndLogprobs:
        """A completion of `prompt` or `input_ids`: the prompt's ids, and for each choice its ids, its
        log-probabilities and why it ended. BadRequest if the server does not return them."""
        request = _with_prompt(request)
        answered = await self.ask_for_tokens(Upstream.COMPLETIONS, request, split)
        reply = read_object(answered.raw, "answer")
        choices = read_choices(reply)
        turns = [turn for choice in choices if (turn := read_turn(reply, choice, request)) is not None]
        if len(turns) < len(choices) or any(turn.logprobs is None for turn in turns):
            raise BadRequest(f"{answered.server.url} gives no token ids with log-probabilities; vLLM does")
        if split == "train":
            note_sampling((turn.temperature, turn.untrainable) for turn in turns)
        return (
            list(turns[0].prompt_ids.tolist()),
            [list(turn.response_ids.tolist()) for turn in turns],
            [[] if turn.logprobs is None else list(turn.logprobs.tolist()) for turn in turns],
            [turn.finish_reason or "stop" for turn in turns],
        )

    async def get_logprobs(
        self, *, split: Split = "train", top_k: int = 1, top_logprobs: int | None = None, **request: Any
    ) -> dict[str, Any]:
        """The model's log-probabilities of `prompt` or `input_ids`: `prompt_tokens`, and for each of them the ids and
        the log-probabilities of the most probable tokens and of itself. The first token has none. For vLLM."""
        own = {"prompt_logprobs": max(1, top_logprobs or top_k), "return_token_ids": True}
        request = {"max_tokens": 1, **_with_prompt(request)}
        request["extra_body"] = {**(request.get("extra_body") or {}), **own}
        raw = await self.call(lambda server: server.raw_reply(Upstream.COMPLETIONS, request), split)
        (choice,) = read_choices(read_object(raw, "answer"))
        tokens, entries = choice.get("prompt_token_ids"), choice.get("prompt_logprobs")
        if not isinstance(tokens, list) or not isinstance(entries, list) or len(tokens) != len(entries):
            raise BadRequest("the server gives no log-probabilities of the prompt; vLLM does")
        return {
            "prompt_tokens": tokens,
            "prompt_topk_token_ids": [[int(token) for token in entry or {}] for entry in entries],
            "prompt_topk_logprobs": [[float(own["logprob"]) for own in (entry or {}).values()] for entry in entries],
        }

    async def ask_for_tokens(
        self, upstream: Upstream, request: dict[str, Any], split: Split, preferred: "Server | None" = None
    ) -> "ServerReply":
        return await self.call(lambda server: server.ask_with_tokens(upstream, request), split, preferred)

    async def _ask(self, upstream: Upstream, request: dict[str, Any], split: Split) -> Any:
        reply = await self.call(lambda server: server.ask(upstream, request), split)
        if split == "train":
            choices = getattr(reply, "choices", ())  # a stream has none
            note_sampling(asked_sampling(choice.model_extra or {}, request) for choice in choices)
        return reply


def _with_prompt(request: Mapping[str, Any]) -> dict[str, Any]:
    """`input_ids` are the prompt as ids."""
    rest = {name: value for name, value in request.items() if name != "input_ids"}
    return rest if request.get("input_ids") is None else {**rest, "prompt": list(request["input_ids"])}
