"""One server an environment samples from, called with the openai package."""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stepwell.common.optional import require
from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers.slots import Slots
from stepwell.wire.openai import Upstream

log = logging.getLogger("stepwell.envs")

Split: TypeAlias = Literal["train", "eval"]
LOOK_AGAIN = 1.0
"""Seconds between two looks at a server that is down."""
LOOK_TIMEOUT = 5.0
KEYLESS = "not-needed"
"""The openai package insists on a key."""


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    server: "Server"
    reply: Any
    """As the openai package reads it."""
    raw: bytes


class Server:
    """Whoever has one closes it. Compared by identity."""

    def __init__(self, config: APIServerConfig) -> None:
        self.config = config
        self.slots: dict[Split, Slots] = {
            "train": Slots(config.num_max_requests_at_once),
            "eval": Slots(config.num_requests_for_eval),
        }
        self.up = asyncio.Event()
        """Cleared while it cannot be reached."""
        self.up.set()
        self._openai = openai_package()
        self._client = self._openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=config.api_key or os.environ.get("OPENAI_API_KEY") or KEYLESS,
            timeout=config.timeout,
        )
        self._way = 0
        """Which of the ways to ask for tokens it is asked by."""
        self._is_sure = False
        self._looking: asyncio.Task[None] | None = None
        self._has_warned = False

    def update_weight(self, weight: float) -> None:
        self.slots["train"].resize(int(self.config.num_max_requests_at_once * weight))
        self.slots["eval"].resize(int(self.config.num_requests_for_eval * weight))

    async def ask(self, upstream: Upstream, wanted: dict[str, Any]) -> Any:
        """The openai package's own answer, or its own exception."""
        return await self._calls(upstream).create(**self._named(wanted))

    async def ask_for_tokens(self, upstream: Upstream, wanted: dict[str, Any]) -> Answered:
        """Asks for as much as the server is found to give: a plain one refuses what only vLLM understands."""
        calls = self._calls(upstream).with_raw_response
        ways = _ways(upstream, self._named(wanted))
        for way in range(self._way, len(ways)):
            try:
                got = await calls.create(**ways[way])
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError):
                if self._is_sure or way + 1 == len(ways):
                    raise
            else:
                self._way, self._is_sure = way, True
                return Answered(self, got.parse(), got.content)
        raise AssertionError("the last way answers or raises")

    def set_down(self, why: object) -> None:
        """Until it answers again, which is looked after from now on."""
        if self.up.is_set():
            log.warning("server %s cannot be reached: %s", self.config.base_url, why)
            self.up.clear()
            self._looking = asyncio.create_task(self._look())

    def warn_of_text(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "server %s gives no token ids of its own: its text is encoded again, which may differ from what was "
                "sampled; for exact tokens sample from vLLM, directly or through Stepwell's gateway",
                self.config.base_url,
            )

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._client.close()

    async def _look(self) -> None:
        while not self.up.is_set():
            await asyncio.sleep(LOOK_AGAIN)
            if await self._answers():
                log.info("server %s is back", self.config.base_url)
                self.up.set()

    async def _answers(self) -> bool:
        try:
            await self._client.with_options(max_retries=0).models.list(timeout=LOOK_TIMEOUT)
        except self._openai.APIConnectionError:
            return False
        except self._openai.APIStatusError as refused:
            return bool(refused.status_code < 500)
        return True

    def _calls(self, upstream: Upstream) -> Any:
        return self._client.chat.completions if upstream is Upstream.CHAT else self._client.completions

    def _named(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.config.model_name, **wanted}


def openai_package() -> Any:
    return require("openai", "envs", purpose="an environment's sampling server")


def _ways(upstream: Upstream, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """How to ask for tokens: the best first."""
    logprobs = wanted.get("logprobs") or (True if upstream is Upstream.CHAT else 0)
    with_logprobs = {**wanted, "logprobs": logprobs}
    ids = {**(wanted.get("extra_body") or {}), "return_token_ids": True}
    return [{**with_logprobs, "extra_body": ids}, with_logprobs, wanted]
