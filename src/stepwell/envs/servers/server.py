"""One server that an environment samples from, called with the openai package."""

import asyncio
import logging
import os
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stepwell.common.optional import require
from stepwell.envs.config import APIServerConfig
from stepwell.wire.openai import Upstream

log = logging.getLogger("stepwell.envs")

Split: TypeAlias = Literal["train", "eval"]
CHECK_PAUSE = 1.0
"""Seconds between two checks of a server that cannot be reached."""
CHECK_TIMEOUT = 5.0
NO_KEY = "not-needed"
"""The openai package requires a key."""


class CallSlots:
    """`async with slots:` holds one of a limited number. The limit can change; callers are served in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def load(self) -> float:
        """Running and waiting calls, as a share of the limit."""
        return (self._taken + len(self._waiting)) / self._limit

    def resize(self, limit: int) -> None:
        """Running calls go on, even if there are more than the new limit."""
        self._limit = max(1, limit)
        self._admit()

    async def __aenter__(self) -> None:
        if self._taken < self._limit and not self._waiting:
            self._taken += 1
            return
        admission = asyncio.get_running_loop().create_future()
        self._waiting.append(admission)
        try:
            await admission
        except asyncio.CancelledError:
            if not admission.cancelled():  # admitted at the moment of its cancellation
                self._leave()
            elif admission in self._waiting:
                self._waiting.remove(admission)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._taken < self._limit:
            admission = self._waiting.popleft()
            if not admission.cancelled():
                self._taken += 1
                admission.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class ServerReply:
    server: "Server"
    reply: Any
    """As the openai package parses it."""
    raw: bytes


class Server:
    """Whoever makes one closes it. Compared by identity."""

    def __init__(self, config: APIServerConfig) -> None:
        self.config = config
        self.slots: dict[Split, CallSlots] = {
            "train": CallSlots(config.num_max_requests_at_once),
            "eval": CallSlots(config.num_requests_for_eval),
        }
        self.up = asyncio.Event()
        """Cleared while it cannot be reached."""
        self.up.set()
        self._openai = openai_package()
        self._client = self._openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=config.api_key or os.environ.get("OPENAI_API_KEY") or NO_KEY,
            timeout=config.timeout,
        )
        self._form = 0
        """The index of the request form in `_forms`."""
        self._is_form_known = False
        self._checking: asyncio.Task[None] | None = None
        self._has_warned = False

    def update_weight(self, weight: float) -> None:
        self.slots["train"].resize(int(self.config.num_max_requests_at_once * weight))
        self.slots["eval"].resize(int(self.config.num_requests_for_eval * weight))

    async def ask(self, upstream: Upstream, request: dict[str, Any]) -> Any:
        """The reply of the openai package, or its exception."""
        return await self._calls(upstream).create(**self._with_model(request))

    async def ask_for_tokens(self, upstream: Upstream, request: dict[str, Any]) -> ServerReply:
        """Asks for as many details as the server supports: a plain server refuses vLLM's own parameters."""
        calls = self._calls(upstream).with_raw_response
        forms = _forms(upstream, self._with_model(request))
        for form in range(self._form, len(forms)):
            try:
                response = await calls.create(**forms[form])
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError):
                if self._is_form_known or form + 1 == len(forms):
                    raise
            else:
                self._form, self._is_form_known = form, True
                return ServerReply(self, response.parse(), response.content)
        raise AssertionError("the last form is answered or raises")

    def set_down(self, why: object) -> None:
        """Marks it as unreachable, and checks it until it answers again."""
        if self.up.is_set():
            log.warning("server %s cannot be reached: %s", self.config.base_url, why)
            self.up.clear()
            self._checking = asyncio.create_task(self._check_until_up())

    def warn_of_text(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "server %s gives no token ids of its own: its text is encoded again, which may differ from what was "
                "sampled; for exact tokens sample from vLLM, directly or through Stepwell's gateway",
                self.config.base_url,
            )

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await self._client.close()

    async def _check_until_up(self) -> None:
        while not self.up.is_set():
            await asyncio.sleep(CHECK_PAUSE)
            if await self._answers():
                log.info("server %s is back", self.config.base_url)
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

    def _with_model(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.config.model_name, **request}


def openai_package() -> Any:
    return require("openai", "envs", purpose="an environment's sampling server")


def _forms(upstream: Upstream, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The request with ids and log-probabilities, with log-probabilities, and as it is."""
    logprobs = request.get("logprobs") or (True if upstream is Upstream.CHAT else 0)
    with_logprobs = {**request, "logprobs": logprobs}
    ids = {**(request.get("extra_body") or {}), "return_token_ids": True}
    return [{**with_logprobs, "extra_body": ids}, with_logprobs, request]
