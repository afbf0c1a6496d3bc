"""The client of a rollout server: `stepwell atropos`, or any server with Atropos' API.

- Every attempt to send a group has the same idempotency key, so a server that remembers keys accepts the group once.
- A group is accepted by the server, or counted and written to `unsent`. It travels as Arrow if both sides support it,
  else as JSON, compressed from 1 KiB on.
- RolloutServerAway means that a repetition may help, RolloutServerRefused that it will not.
"""

import asyncio
import contextlib
import gzip
import importlib.util
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson

from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.envs.scored_data import ScoredDataGroup, append_group
from stepwell.errors import BadRequest, RolloutServerAway, RolloutServerRefused
from stepwell.wire.scored_groups import EnvRegistered, EnvRegistration, EnvStatus

log = logging.getLogger("stepwell.envs")

T = TypeVar("T")

REPLY_TIMEOUT = 30.0
SEND_TIMEOUT = 60.0
"""Seconds for which a group is sent again while the server is unreachable."""
BACKOFF = Backoff(first=0.1, longest=5.0)
POLL = 1.0
"""Seconds between two attempts while the environment can only wait."""
WAITING = Backoff(first=POLL, longest=POLL)
BUSY = (408, 425, 429)
"""Statuses below 500 after which a repetition may help."""
COMPRESSED_FROM = 1_024
GZIP_LEVEL = 1
"""Saves most of the bytes in a quarter of the time."""


class RolloutServer:
    """Used inside `async with`."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        unsent: Path = Path("unsent.jsonl"),
        send_timeout: float = SEND_TIMEOUT,
    ) -> None:
        self.url = url.rstrip("/")
        self.unsent = 0
        """Groups that the server did not accept; they are in the file."""
        self._key = key
        self._unsent_file = unsent
        self._send_timeout = send_timeout
        self._session: aiohttp.ClientSession | None = None
        self._has_arrow: bool | None = None

    async def __aenter__(self) -> "RolloutServer":
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=REPLY_TIMEOUT), connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def register_env(self, registration: EnvRegistration) -> EnvRegistered:
        """Waits for the server and its trainer, and logs what it waits for."""

        async def register() -> EnvRegistered:
            answer = await self._ask("POST", "/register-env", registration.model_dump())
            if answer["status"] != "success":
                raise RolloutServerAway(f"the rollout server at {self.url} says: {answer['status']}")
            return EnvRegistered.model_validate(answer)

        return await self._patiently(register)

    async def info(self) -> tuple[int, int]:
        """The trainer's batch_size and max_token_len; -1 if it has none."""
        answer = await self._patiently(lambda: self._ask("GET", "/info"))
        return int(answer["batch_size"]), int(answer["max_token_len"])

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """The trainer's project and group."""
        answer = await self._patiently(lambda: self._ask("GET", "/wandb_info"))
        return answer["project"], answer["group"]

    async def status(self, env_id: int) -> EnvStatus:
        answer = await self._ask("GET", "/status-env", {"env_id": env_id})
        if "current_step" not in answer:
            raise RolloutServerRefused(f"the rollout server knows no environment {env_id}: {answer}")
        return EnvStatus.model_validate(answer)

    async def disconnect(self, env_id: int) -> None:
        await self._ask("POST", "/disconnect-env", {"env_id": env_id})

    async def send(self, group: ScoredDataGroup, env_id: int | None) -> str:
        """Empty if the server accepted it; else the reason why it was written to `unsent`."""
        body = {**group, "env_id": env_id}
        try:
            await self._send(body)
        except (RolloutServerAway, RolloutServerRefused) as failure:
            self.unsent += 1
            log.error("a group was not accepted and is kept in %s: %s", self._unsent_file, failure)
            await asyncio.to_thread(append_group, self._unsent_file, body)
            return str(failure)
        return ""

    async def _send(self, group: Mapping[str, Any]) -> None:
        key = uuid.uuid4().hex
        packed: tuple[bytes, dict[str, str]] | None = None

        async def send_once() -> None:
            nonlocal packed
            if packed is None:
                packed = await asyncio.to_thread(pack_group, group, arrow=await self._accepts_arrow())
            body, headers = packed
            headers = {**headers, "Idempotency-Key": key}
            async with self._answer("POST", "/scored_data", data=body, headers=headers) as answer:
                await answer.read()

        def log_pause(away: RolloutServerAway, pause: float) -> float:
            log.warning("a group is sent again in %.1f s: %s", pause, away)
            return pause

        await retry_while_unavailable(
            send_once, RolloutServerAway, BACKOFF, seconds=self._send_timeout, before_pause=log_pause
        )

    async def _accepts_arrow(self) -> bool:
        """Asked once."""
        if self._has_arrow is None:
            try:
                has_pyarrow = importlib.util.find_spec("pyarrow") is not None
                self._has_arrow = has_pyarrow and bool((await self._ask("GET", "/")).get("arrow"))
            except RolloutServerRefused:
                self._has_arrow = False
        return self._has_arrow

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeated until the server answers."""
        logged = ""

        def log_once(away: RolloutServerAway, pause: float) -> float:
            nonlocal logged
            if str(away) != logged:
                log.info("waiting: %s", away)
            logged = str(away)
            return pause

        return await retry_while_unavailable(ask, RolloutServerAway, WAITING, before_pause=log_once)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._answer(method, path, json=body) as answer:
            read = orjson.loads(await answer.read())
        if not isinstance(read, dict):
            raise RolloutServerRefused(f"{self.url}{path} is no rollout server: it answered {str(read)[:200]}")
        return read

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful answer; every other one is a RolloutServerAway or a RolloutServerRefused."""
        if self._session is None:
            raise RuntimeError("a RolloutServer is used with `async with`")
        try:
            async with self._session.request(method, self.url + path, **request) as answer:
                if answer.status >= 400:
                    raise _failure(answer.status, f"{self.url}{path}", await answer.text(errors="replace"))
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            why = str(failure) or type(failure).__name__
            raise RolloutServerAway(f"the rollout server at {self.url} cannot be reached: {why}") from failure
        except orjson.JSONDecodeError as failure:
            raise RolloutServerRefused(f"{self.url}{path} is no rollout server: it did not answer JSON") from failure


def pack_group(group: Mapping[str, Any], *, arrow: bool) -> tuple[bytes, dict[str, str]]:
    """A group as a request body, with its headers. RolloutServerRefused if no server could accept it."""
    try:
        body = orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as failure:
        raise RolloutServerRefused(f"the group cannot be written as JSON: {failure}") from failure
    if arrow:
        return _as_arrow(body), {"Content-Type": "application/vnd.apache.arrow.stream"}
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESSED_FROM:
        return body, headers
    return gzip.compress(body, GZIP_LEVEL), {**headers, "Content-Encoding": "gzip"}


def _as_arrow(body: bytes) -> bytes:
    from stepwell.wire.scored_groups import groups_from_json
    from stepwell.wire.scored_groups_arrow import groups_to_arrow

    try:
        return groups_to_arrow(groups_from_json(body, "group"))
    except BadRequest as failure:
        raise RolloutServerRefused(f"rollout servers do not accept this group: {failure}") from failure


def _failure(status: int, where: str, text: str) -> RolloutServerAway | RolloutServerRefused:
    kind = RolloutServerAway if status >= 500 or status in BUSY else RolloutServerRefused
    return kind(f"{where} answered {status}: {text[:500]}")
