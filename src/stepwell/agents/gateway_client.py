"""A gateway's HTTP calls, for many rollouts at once.

- A refusal is raised as the error that the gateway meant.
- Calls that open or end a trajectory are repeated while the gateway or pool is unavailable; they name the trajectory,
  so repeating them is safe.
- An agent's calls are never repeated: each would be a step.
"""

from collections.abc import Mapping
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import urlencode

import aiohttp
import orjson
from pydantic import BaseModel, ValidationError

from stepwell.client import gateway_address
from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.common.user_input import explain_all
from stepwell.errors import (
    BadRequest,
    GatewayUnreachable,
    NotReady,
    Overloaded,
    PoolFull,
    PoolUnavailable,
    StepwellError,
    from_answer,
)
from stepwell.wire import gateway_api as shapes

S = TypeVar("S", bound=BaseModel)
Temporary: TypeAlias = tuple[type[StepwellError], ...]

TIMEOUT = aiohttp.ClientTimeout(total=90, sock_connect=10)
"""The timeout of the gateway's own calls. Longer than the gateway waits itself, so its error text arrives."""
SAMPLING = aiohttp.ClientTimeout(total=None, sock_connect=10)
"""The timeout of calls that wait for the model: none, because the caller has its own limit."""
PATIENCE = 120.0
"""Seconds to wait for a gateway or pool that is unavailable."""
BACKOFF = Backoff(first=0.1, longest=2.0)
REPORTED = (NotReady, Overloaded, PoolFull, PoolUnavailable)
"""Temporary failures that a running gateway reports."""
TEMPORARY = (GatewayUnreachable, *REPORTED)


class GatewayClient:
    """Used inside `async with`."""

    def __init__(self, url: str, key: str | None = None, *, patience: float = PATIENCE) -> None:
        """`patience`: seconds to wait for a gateway or pool that is unavailable."""
        self.url = gateway_address(url)
        self.key = key
        self._patience = patience
        self._http: aiohttp.ClientSession | None = None
        self._model: str | None = None

    async def open_trajectory(self, wanted: shapes.InitTrajectory) -> shapes.TrajectoryOpened:
        return await retry_while_unavailable(
            lambda: self.ask("POST", "/init_trajectory", shapes.TrajectoryOpened, wanted),
            TEMPORARY,
            BACKOFF,
            seconds=self._patience,
        )

    async def complete_trajectory(self, ref: str, reward: float | None, failure: str = "", exception: str = "") -> str:
        """`ref` is trajectory_uid/prompt_uid. Returns the trajectory's status.

        Not repeated after GatewayUnreachable: a gateway that dies may lose the rollout's last steps, and the next one
        would complete the rollout without them.
        """
        said = shapes.CompleteTrajectory(reward=reward, failure=failure, exception=exception[:100])
        return await self._end(ref, "complete", said, self._patience, REPORTED)

    async def abort_trajectory(self, ref: str, reason: str, patience: float | None = None, exception: str = "") -> str:
        wait = self._patience if patience is None else patience
        said = shapes.AbortTrajectory(reason=reason, exception=exception[:100])
        return await self._end(ref, "abort", said, wait, TEMPORARY)

    async def _end(self, ref: str, how: str, said: BaseModel, patience: float, temporary: Temporary) -> str:
        path = f"/{ref}/v1/{how}_trajectory"
        ended = await retry_while_unavailable(
            lambda: self.ask("POST", path, shapes.TrajectoryEnded, said), temporary, BACKOFF, seconds=patience
        )
        return str(ended.status)

    async def pacing(self, channel: str) -> shapes.PacingNow:
        return await self.ask("GET", f"/pacing?{urlencode({'channel': channel})}", shapes.PacingNow)

    async def policy_version(self) -> int | None:
        """The oldest version of all engines; None if none reports a number."""
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
        """The name of the model that the engines serve."""
        if self._model is None:
            listed = orjson.loads(await self._bytes("GET", f"{self.url}/v1/models", None, self.key, TIMEOUT))
            self._model = str(listed["data"][0]["id"])
        return self._model

    async def chat(self, base_url: str, api_key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An agent's call; returns the engine's reply."""
        url = f"{base_url}/chat/completions"
        try:
            encoded = orjson.dumps(body)
        except TypeError as failure:
            raise BadRequest(f"a call cannot be sent as JSON: {failure}") from None
        return dict(orjson.loads(await self._bytes("POST", url, encoded, api_key, SAMPLING)))

    async def ask(
        self,
        method: str,
        path: str,
        shape: type[S],
        said: BaseModel | None = None,
        timeout: aiohttp.ClientTimeout = TIMEOUT,
    ) -> S:
        body = None if said is None else said.model_dump_json(exclude_none=True).encode()
        raw = await self._bytes(method, f"{self.url}{path}", body, self.key, timeout)
        try:
            return shape.model_validate_json(raw)
        except ValidationError as wrong:
            why = explain_all(wrong.errors()[:3])
            raise GatewayUnreachable(f"{self.url}{path} does not answer like a Stepwell gateway: {why}") from None

    async def _bytes(
        self, method: str, url: str, body: bytes | None, key: str | None, timeout: aiohttp.ClientTimeout
    ) -> bytes:
        if self._http is None:
            raise BadRequest("the gateway client is not open: use it inside `async with`")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with self._http.request(method, url, data=body, headers=headers, timeout=timeout) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            why = str(failure) or type(failure).__name__
            raise GatewayUnreachable(f"no gateway answers at {url}: {why}") from None
        if answer.status != 200:
            raise from_answer(url, answer.status, raw)
        return raw

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.close()
        self._http = None
