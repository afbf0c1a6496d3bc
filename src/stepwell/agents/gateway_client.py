"""The way to a gateway for many rollouts at once: its own calls over kept connections, answers checked as they arrive.

What always holds: a refusal comes back as the error that the gateway meant; what is asked with patience may be asked
twice, so such calls name their trajectory themselves and are safe to repeat; an agent's calls are never repeated, for
each would be a step.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import urlencode

import aiohttp
import orjson
from pydantic import BaseModel, ValidationError

from stepwell.common.retry import Backoff, retry_while_unavailable
from stepwell.errors import (
    BadRequest,
    GatewayUnreachable,
    NotReady,
    Overloaded,
    PoolFull,
    PoolUnavailable,
    StepwellError,
    from_code,
)
from stepwell.wire import gateway_api as shapes

S = TypeVar("S", bound=BaseModel)
Passing: TypeAlias = tuple[type[StepwellError], ...]

TIMEOUT = aiohttp.ClientTimeout(total=90, sock_connect=10)
"""Of the gateway's own calls. Longer than its own waiting, so that its reason arrives."""
SAMPLING = aiohttp.ClientTimeout(total=None, sock_connect=10)
"""Of calls that wait for the model: whoever makes them has a limit of its own."""
PATIENCE = 120.0
"""Seconds for which a gateway or a pool that is away is waited for."""
BACKOFF = Backoff(first=0.1, longest=2.0)
SPOKEN = (NotReady, Overloaded, PoolFull, PoolUnavailable)
"""Failures that time may cure, told by a gateway that lives."""
PASSING = (GatewayUnreachable, *SPOKEN)
"""Failures that time may cure."""


class GatewayClient:
    """Used inside `async with`."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self._http: aiohttp.ClientSession | None = None
        self._model: str | None = None

    async def open_trajectory(self, wanted: shapes.InitTrajectory, patience: float) -> shapes.TrajectoryOpened:
        return await retry_while_unavailable(
            lambda: self.ask("POST", "/init_trajectory", shapes.TrajectoryOpened, _dumped(wanted)),
            PASSING,
            BACKOFF,
            seconds=patience,
        )

    async def complete_trajectory(self, ref: str, reward: float | None, patience: float) -> str:
        """`ref` is trajectory_uid/prompt_uid. Gives the trajectory's status.

        GatewayUnreachable is final here: a gateway that dies may take the rollout's last steps with it, and another one
        would complete the rollout without them.
        """
        return await self._end(ref, "complete", shapes.CompleteTrajectory(reward=reward), patience, SPOKEN)

    async def abort_trajectory(self, ref: str, reason: str, patience: float) -> str:
        return await self._end(ref, "abort", shapes.AbortTrajectory(reason=reason), patience, PASSING)

    async def _end(self, ref: str, how: str, said: BaseModel, patience: float, passing: Passing) -> str:
        path = f"/{ref}/v1/{how}_trajectory"
        ended = await retry_while_unavailable(
            lambda: self.ask("POST", path, shapes.TrajectoryEnded, _dumped(said)), passing, BACKOFF, seconds=patience
        )
        return str(ended.status)

    async def pacing(self, channel: str) -> shapes.PacingNow:
        return await self.ask("GET", f"/pacing?{urlencode({'channel': channel})}", shapes.PacingNow)

    async def policy_version(self) -> int | None:
        """The oldest that an engine has; None where none says it in a number."""
        engines = (await self.ask("GET", "/engines", shapes.EngineList)).engines
        told = [int(e.weight_version) for e in engines if e.weight_version and e.weight_version.isdecimal()]
        return min(told, default=None)

    async def why_not_ready(self) -> str | None:
        try:
            await self.ask("GET", "/ready", shapes.Readiness)
        except StepwellError as failure:
            return str(failure)
        return None

    async def model(self) -> str:
        """The name of the engines' model."""
        if self._model is None:
            listed = orjson.loads(await self._bytes("GET", f"{self.url}/v1/models", None, self.key, TIMEOUT))
            self._model = str(listed["data"][0]["id"])
        return self._model

    async def chat(self, base_url: str, api_key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An agent's call. The reply, as the engine wrote it."""
        url = f"{base_url}/v1/chat/completions"
        return dict(orjson.loads(await self._bytes("POST", url, _encoded(body), api_key, SAMPLING)))

    async def ask(
        self,
        method: str,
        path: str,
        shape: type[S],
        body: bytes | None = None,
        timeout: aiohttp.ClientTimeout = TIMEOUT,
    ) -> S:
        raw = await self._bytes(method, f"{self.url}{path}", body, self.key, timeout)
        try:
            return shape.model_validate_json(raw)
        except ValidationError as wrong:
            raise GatewayUnreachable(f"{self.url}{path} answers what no gateway of ours would: {wrong}") from None

    async def _bytes(
        self, method: str, url: str, body: bytes | None, key: str | None, timeout: aiohttp.ClientTimeout
    ) -> bytes:
        if self._http is None:
            raise BadRequest("this is not open: use it inside `async with`")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with self._http.request(method, url, data=body, headers=headers, timeout=timeout) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            why = str(failure) or type(failure).__name__
            raise GatewayUnreachable(f"no gateway answers at {url}: {why}") from None
        if answer.status != 200:
            raise _refusal(url, answer.status, raw)
        return raw

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()
        self._http = None


def _refusal(url: str, status: int, raw: bytes) -> StepwellError:
    try:
        body = orjson.loads(raw)
        if "missing" in body:
            return NotReady("; ".join(f"{part}: {why}" for part, why in body["missing"].items()))
        return from_code(body["error"]["code"], str(body["error"]["message"]))
    except (ValueError, TypeError, KeyError):
        return GatewayUnreachable(f"{url} answers {status} and is no gateway of Stepwell's")


def _dumped(said: BaseModel) -> bytes:
    return said.model_dump_json(exclude_none=True).encode()


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as failure:
        raise BadRequest(f"a call cannot be sent as JSON: {failure}") from None
