"""One server that an environment samples from, called with the openai package, and the calls that it shares with the
manager of several servers."""

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import anyio
import numpy as np

from stepwell.common.imports import require
from stepwell.engines.capabilities import probe_logprobs_mode
from stepwell.envs.config import APIServerConfig, BaseEnvConfig
from stepwell.envs.servers.sequences import asked_sampling, note_sampling, read_turn
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import JsonObject
from stepwell.steps.trainable import PROCESSED, RAW, UNKNOWN_MODE
from stepwell.wire.openai import Upstream, read_choices, read_object

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

log = logging.getLogger("stepwell.envs")

R = TypeVar("R")
Split: TypeAlias = Literal["train", "eval"]
TokensAndLogprobs: TypeAlias = tuple[list[int], list[list[int]], list[list[float]], list[str]]
CHECK_PAUSE = 1.0
"""Seconds between two checks of a server that cannot be reached."""
CHECK_TIMEOUT = 5.0
NO_REASONING: Mapping[str, Any] = MappingProxyType({})
RECORDED_HEADER = "x-stepwell-trajectory"
"""The header in the answers of a gateway that records the call itself."""
NO_KEY = "not-needed"
"""The openai package requires a key."""


@dataclass(frozen=True, slots=True, eq=False)
class ServerReply:
    server: "Server"
    reply: Any
    """The reply, as the openai package parses it."""
    raw: bytes


class SamplingCalls(ABC):
    @abstractmethod
    async def call(self, ask: "Callable[[Server], Awaitable[R]]", split: Split, preferred: "Server | None" = None) -> R:
        """The result of `ask` for a server that can be reached, within its limit of concurrent calls."""

    async def chat_completion(self, *, split: Split = "train", **request: Any) -> "ChatCompletion":
        """Takes the arguments of chat.completions.create of the openai package; `split="eval"` counts against the limit
        of evaluations."""
        reply: ChatCompletion = await self._ask(Upstream.CHAT, request, split)
        return reply

    async def completion(self, *, split: Split = "train", **request: Any) -> "Completion":
        """Takes the arguments of completions.create of the openai package."""
        reply: Completion = await self._ask(Upstream.COMPLETIONS, request, split)
        return reply

    async def tokens_and_logprobs_completion(self, *, split: Split = "train", **request: Any) -> TokensAndLogprobs:
        """A completion of `prompt` or `input_ids`: the prompt's ids, and for each choice its ids, its
        log-probabilities and why it ended. BadRequest if the server does not return them."""
        request = _with_prompt(request)
        answered = await self.ask_for_tokens(Upstream.COMPLETIONS, request, split)
        reply = read_object(answered.raw, "answer")
        choices = read_choices(reply)
        mode = await answered.server.mode_of(choices, request)
        turns = [turn for choice in choices if (turn := read_turn(reply, choice, request, mode)) is not None]
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
            raise BadRequest("the server gives no log-probabilities of the prompt; vLLM itself does")
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
        async def ask(server: "Server") -> tuple[Server, Any]:
            return server, await server.ask(upstream, request)

        server, reply = await self.call(ask, split)
        if split == "train":
            choices = [choice.model_extra or {} for choice in getattr(reply, "choices", ())]  # a stream has none
            mode = await server.mode_of(choices, request) if request.get("logprobs") else ""
            note_sampling(asked_sampling(choice, request, mode) for choice in choices)
        return reply


class Server(SamplingCalls):
    """Whoever makes one closes it. Compared by identity."""

    def __init__(self, config: APIServerConfig, reasoning: Mapping[str, Any] = NO_REASONING) -> None:
        """`reasoning`: fields that are added to the body of each call."""
        self.config = config
        self._reasoning = reasoning
        self.slots: dict[Split, anyio.CapacityLimiter] = {
            "train": anyio.CapacityLimiter(config.num_max_requests_at_once),
            "eval": anyio.CapacityLimiter(max(1, config.num_requests_for_eval)),
        }
        """Callers are served in order."""
        self.seconds: dict[Split, deque[float]] = {
            "train": deque(maxlen=max(1, config.rolling_buffer_length)),
            "eval": deque(maxlen=max(1, config.rolling_buffer_length)),
        }
        """Durations of the last calls."""
        self.up = asyncio.Event()
        """Cleared while it cannot be reached."""
        self.up.set()
        self.url = config.base_url or "https://api.openai.com/v1"
        self._openai = openai_package()
        self._client = self._openai.AsyncOpenAI(
            base_url=self.url,
            api_key=config.api_key or os.environ.get("OPENAI_API_KEY") or NO_KEY,
            timeout=config.timeout,
        )
        self._form = 0
        """The index of the request form in `_forms`."""
        self._is_form_known = False
        self._checking: asyncio.Task[None] | None = None
        self._has_warned = False
        self._mode: str | None = None
        self._probing = asyncio.Lock()

    def update_weight(self, weight: float) -> None:
        """Running calls go on, even if there are more than the new limit."""
        self.slots["train"].total_tokens = max(1, int(self.config.num_max_requests_at_once * weight))
        self.slots["eval"].total_tokens = max(1, int(self.config.num_requests_for_eval * weight))

    def load(self, split: Split) -> float:
        """Running and waiting calls, as a share of the limit."""
        slots = self.slots[split].statistics()
        return (slots.borrowed_tokens + slots.tasks_waiting) / slots.total_tokens

    @asynccontextmanager
    async def slot(self, split: Split) -> AsyncIterator[None]:
        """Within the limit of concurrent calls; a call that ends well is timed."""
        async with self.slots[split]:
            began_at = time.monotonic()
            yield
            self.seconds[split].append(time.monotonic() - began_at)

    async def call(self, ask: "Callable[[Server], Awaitable[R]]", split: Split, preferred: "Server | None" = None) -> R:
        async with self.slot(split):
            return await ask(self)

    async def wandb_metrics(self, metrics_dict: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        """Adds the durations of the last calls to the metrics."""
        metrics = {} if metrics_dict is None else metrics_dict
        for split, seconds in self.seconds.items():
            if seconds:
                name = f"server/{server_name or 'server'}_{'eval_' if split == 'eval' else ''}request_time"
                own = np.array(seconds)
                metrics |= {f"{name}_avg": own.mean(), f"{name}_std": own.std(), f"{name}_99p": np.percentile(own, 99)}
        return metrics

    async def raw_reply(self, upstream: Upstream, request: dict[str, Any]) -> bytes:
        reply = await self._calls(upstream).with_raw_response.create(**self._whole(request))
        return bytes(reply.content)

    async def ask(self, upstream: Upstream, request: dict[str, Any]) -> Any:
        """The reply of the openai package, or its exception."""
        whole, calls = self._whole(request), self._calls(upstream)
        if not self.config.n_kwarg_is_ignored:
            return await calls.create(**whole)
        first, *more = await asyncio.gather(*(calls.create(**{**whole, "n": 1}) for _ in range(whole.get("n") or 1)))
        first.choices += [choice for reply in more for choice in reply.choices]
        return first

    async def ask_with_tokens(self, upstream: Upstream, request: dict[str, Any]) -> ServerReply:
        """Asks for as many details as the server supports: a plain server refuses vLLM's own parameters."""
        calls = self._calls(upstream).with_raw_response
        forms = _forms(upstream, self._whole(request))
        for form in range(self._form, len(forms)):
            try:
                response = await calls.create(**forms[form])
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError):
                if self._is_form_known or form + 1 == len(forms):
                    raise
            else:
                if RECORDED_HEADER in response.headers:
                    root = self.url.rstrip("/").removesuffix("/v1").removesuffix("/session")
                    raise BadRequest(
                        f"{self.url} records each call as a session, so that it would be trained twice; "
                        f"use {root}/unrecorded/v1"
                    )
                self._form, self._is_form_known = form, True
                return ServerReply(self, response.parse(), response.content)
        raise AssertionError("the last form is answered or raises")

    def set_down(self, why: object) -> None:
        """Marks it as unreachable, and checks it until it answers again."""
        if self.up.is_set():
            log.warning("server %s cannot be reached: %s", self.url, why)
            self.up.clear()
            self._checking = asyncio.create_task(self._check_until_up())

    def warn_of_text(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "server %s gives no token ids of its own: its text is encoded again, which may differ from what was "
                "sampled; for exact tokens sample from vLLM, directly or through Stepwell's gateway",
                self.url,
            )

    async def mode_of(self, choices: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """The logprobs_mode of the server, if the log-probabilities of these choices depend on it; else empty."""
        is_told = all("untrainable" in choice for choice in choices)  # the gateway knows its engine
        return "" if is_told or request.get("temperature") in (None, 1) else await self.logprobs_mode()

    async def logprobs_mode(self) -> str:
        """RAW or PROCESSED, found out once; UNKNOWN_MODE if it cannot be found out, or not now."""
        async with self._probing:
            if self._mode is None:
                try:
                    self._mode = await probe_logprobs_mode(self._ask_for_completion, self.config.model_name)
                except EngineUnavailable:
                    return UNKNOWN_MODE
                if self._mode != PROCESSED:
                    what = "reports raw" if self._mode == RAW else "does not tell whether it reports raw"
                    log.warning(
                        "server %s %s log-probabilities: what is sampled at other temperatures than 1 is not trained; "
                        "start vLLM with --logprobs-mode processed_logprobs",
                        *(self.url, what),
                    )
        return self._mode

    async def _ask_for_completion(self, request: JsonObject) -> bytes | None:
        own = {name: value for name, value in request.items() if name in ("top_k", "min_p")}
        plain: Any = {name: value for name, value in request.items() if name not in own}
        try:
            reply = await self._client.completions.with_raw_response.create(**plain, extra_body=own)
        except (self._openai.APIConnectionError, self._openai.RateLimitError, self._openai.InternalServerError) as why:
            raise EngineUnavailable(str(why)) from None
        except self._openai.APIError:
            return None
        return bytes(reply.content)

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await self._client.close()

    async def _check_until_up(self) -> None:
        while not self.up.is_set():
            await asyncio.sleep(CHECK_PAUSE)
            if await self._answers():
                log.info("server %s is back", self.url)
                self.up.set()

    async def _answers(self) -> bool:
        try:
            await self._client.with_options(max_retries=0).models.list(timeout=CHECK_TIMEOUT)
        except self._openai.APIConnectionError:
            return False
        except self._openai.APIStatusError as refused:
            return bool(refused.status_code < 500)
        return True

    def _calls(self, upstream: Upstream) -> Any:
        return self._client.chat.completions if upstream is Upstream.CHAT else self._client.completions

    def _whole(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request with the model's name, and the fields of reasoning unless the call says `skip_reasoning`. Ids in
        `stop` become vLLM's `stop_token_ids`: OpenAI's API takes texts only."""
        whole = {"model": self.config.model_name, **request}
        if isinstance(whole.get("stop"), list) and (ids := [each for each in whole["stop"] if isinstance(each, int)]):
            whole["stop"] = [each for each in whole["stop"] if isinstance(each, str)] or None
            whole["extra_body"] = {"stop_token_ids": ids, **(whole.get("extra_body") or {})}
        if not whole.pop("skip_reasoning", False) and self._reasoning:
            whole["extra_body"] = {**(whole.get("extra_body") or {}), **self._reasoning}
        return whole


def reasoning_fields(config: BaseEnvConfig) -> dict[str, Any]:
    """The fields of reasoning as OpenRouter and others read them: the effort, else the number of tokens."""
    effort, tokens = config.reasoning_effort, config.max_reasoning_tokens
    if not (config.thinking_mode or effort or tokens):
        return {}
    limit: dict[str, Any] = {"effort": effort} if effort else {"max_tokens": tokens} if tokens else {}
    return {"reasoning": {"enabled": True, **limit}}


def openai_package() -> Any:
    return require("openai", "envs", purpose="an environment's sampling server")


def _forms(upstream: Upstream, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The request with ids and log-probabilities, with log-probabilities, and as it is."""
    logprobs = request.get("logprobs") or (True if upstream is Upstream.CHAT else 0)
    with_logprobs = {**request, "logprobs": logprobs}
    ids = {**(request.get("extra_body") or {}), "return_token_ids": True}
    return [{**with_logprobs, "extra_body": ids}, with_logprobs, request]


def _with_prompt(request: Mapping[str, Any]) -> dict[str, Any]:
    """`input_ids` are the prompt as ids."""
    rest = {name: value for name, value in request.items() if name != "input_ids"}
    return rest if request.get("input_ids") is None else {**rest, "prompt": list(request["input_ids"])}
