"""What an engine is asked about itself. None of it counts as a call; each question is small and bounded in time.

A question that an engine does not answer as expected is something it cannot do, never a failure; only a server that
cannot be reached or does not list its models raises EngineUnavailable. While vLLM loads weights it is healthy, but says
nothing of its pause or its version: a silence there is no answer, neither yes nor no.
"""

import logging
import re
from dataclasses import dataclass

import aiohttp
import orjson

from stepwell.engines.vllm_generate import GENERATE, read_model
from stepwell.errors import EngineUnavailable
from stepwell.steps.step import Json

log = logging.getLogger("stepwell.gateway")

ANSWER_TIMEOUT = 5.0
"""Seconds for one question; an engine under full load takes its time."""
TESTED = ("0.32",)
"""The versions of vLLM whose /inference/v1/generate is known to answer in the shape that is read here."""
OLDEST_WITH_TOKEN_IDS = (0, 11)
REFUSES_AN_EMPTY_BODY = (400, 422)
"""How an open route answers a request that asks for nothing; a closed one answers 403, a missing one 404."""
BROKEN = (aiohttp.ClientError, TimeoutError, OSError, UnicodeError)
"""What aiohttp raises when a connection fails; the last for a host whose name is none."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a server was found to offer when it was probed."""

    server: str = ""
    """The version it reports, as it writes it; empty for a plain OpenAI server."""
    token_ids: bool = False
    """It is vLLM and takes vLLM's own fields, `return_token_ids` first; a plain OpenAI server gets none of them."""
    generate: bool = False
    """/inference/v1/generate is open."""
    weight_info: bool = False
    """/weight_info tells the version of its weights."""
    pause: bool = False
    """/is_paused tells whether it stands still for a weight update."""
    max_model_len: int | None = None
    """Tokens that prompt and response may have together."""
    model: str = ""
    """The first model it serves."""


class EngineProbe:
    """One engine, asked over `http`: connections of their own, lest an engine look dead while calls queue for one."""

    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self._http = http
        self._address = address

    async def facts(self) -> EngineFacts:
        server = await self._field("/version", "version")
        status, models = await self._ask("/v1/models")
        if status != 200:
            raise EngineUnavailable(f"/v1/models answers {status}")
        model, max_model_len = read_model(models)
        if not isinstance(server, str):
            return EngineFacts(max_model_len=max_model_len, model=model)
        return EngineFacts(
            server=server,
            token_ids=_gives_token_ids(self._address, server),
            generate=server.startswith(TESTED) and await self._is_open(GENERATE),
            weight_info=isinstance(await self._field("/weight_info", "weight_version"), str),
            pause=isinstance(await self._field("/is_paused", "is_paused"), bool),
            max_model_len=max_model_len,
            model=model,
        )

    async def check_health(self, facts: EngineFacts) -> None:
        """EngineUnavailable says what is wrong. A plain OpenAI server has nothing better to tell than its models."""
        path = "/health" if facts.server else "/v1/models"
        status, _ = await self._ask(path)
        if status != 200:
            raise EngineUnavailable(f"{path} answers {status}")

    async def is_paused(self) -> bool | None:
        told = await self._told("/is_paused", "is_paused")
        return told if isinstance(told, bool) else None

    async def weight_version(self) -> str | None:
        told = await self._told("/weight_info", "weight_version")
        return told if isinstance(told, str) else None

    async def _told(self, path: str, name: str) -> Json:
        try:
            return await self._field(path, name)
        except EngineUnavailable:
            return None

    async def _is_open(self, path: str) -> bool:
        status, _ = await self._ask(path, b"{}")
        return status in REFUSES_AN_EMPTY_BODY

    async def _field(self, path: str, name: str) -> Json:
        status, body = await self._ask(path)
        try:
            answer = orjson.loads(body) if status == 200 else None
        except orjson.JSONDecodeError:
            return None
        return answer.get(name) if isinstance(answer, dict) else None

    async def _ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        method = "GET" if body is None else "POST"
        try:
            async with self._http.request(method, self._address + path, data=body, allow_redirects=False) as answer:
                return answer.status, await answer.read()
        except TimeoutError:
            raise EngineUnavailable(f"{path} does not answer within {ANSWER_TIMEOUT:g} s") from None
        except BROKEN as failure:
            raise EngineUnavailable(explained(failure)) from None


def explained(failure: Exception) -> str:
    """aiohttp's failures often have no text of their own."""
    return str(failure) or type(failure).__name__


def _gives_token_ids(address: str, server: str) -> bool:
    """Warns, once for each probe, of a server that Stepwell was not tested with."""
    number = re.match(r"(\d+)\.(\d+)", server)
    gives = number is not None and (int(number[1]), int(number[2])) >= OLDEST_WITH_TOKEN_IDS
    if not server.startswith(TESTED):
        mode = f"without {GENERATE}" if gives else "as a plain OpenAI server, without token ids"
        log.warning("engine %s is version %s, not %s: it is used %s", address, server, " or ".join(TESTED), mode)
    return gives
