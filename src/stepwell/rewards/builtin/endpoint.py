"""A model server that reward functions call over HTTP.

- At most `concurrency` requests are in progress in one event loop.
- A busy or failing server is asked again, with growing pauses, a bounded number of times.
- No text that leaves this module contains the key.
"""

import asyncio
import os
from weakref import WeakKeyDictionary

import aiohttp
import orjson

from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.errors import BadRequest, RewardFailed
from stepwell.steps.step import JsonObject

ATTEMPTS = 4
BACKOFF = Backoff(first=0.5, longest=30.0, jitter=0.5)
LONGEST_TEXT = 300
BUSY = (408, 425, 429)
JSON = {"Content-Type": "application/json"}


class Refused(RewardFailed):
    """The server refuses this request; a repetition would not help."""


class Busy(RewardFailed):
    """The server may answer a repetition."""

    def __init__(self, text: str, *, pause: float | None = None) -> None:
        """`pause` is the time in seconds that the server asks the client to wait."""
        super().__init__(text)
        self.pause = pause


class Endpoint:
    def __init__(
        self,
        url: str,
        *,
        key_variable: str | None = None,
        timeout: float,
        concurrency: int,
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._url = url.rstrip("/")
        self._key = _key(key_variable)
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._concurrency = concurrency
        self._backoff = backoff
        self._limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def session(self) -> aiohttp.ClientSession:
        """The HTTP connections for one sample, used inside `async with`."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return aiohttp.ClientSession(timeout=self._timeout, headers=headers)

    async def post(self, session: aiohttp.ClientSession, path: str, body: JsonObject) -> JsonObject:
        return await retry_while_unavailable(
            lambda: self._post_once(session, path, body),
            Busy,
            self._backoff,
            attempts=ATTEMPTS,
            before_pause=lambda busy, pause: min(max(pause, busy.pause or 0.0), self._backoff.longest),
        )

    async def _post_once(self, session: aiohttp.ClientSession, path: str, body: JsonObject) -> JsonObject:
        url = f"{self._url}{path}"
        limit = self._limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency))
        try:
            async with limit, session.post(url, data=orjson.dumps(body), headers=JSON) as reply:
                return self._read(url, reply, await reply.read())
        except TimeoutError:
            raise Busy(f"{url} did not answer within {self._timeout.total:g} s") from None
        except aiohttp.ClientError as failure:
            raise Busy(f"{url}: {type(failure).__name__}: {failure}") from None

    def _read(self, url: str, reply: aiohttp.ClientResponse, content: bytes) -> JsonObject:
        text = f"{url} answered {reply.status}: {self._excerpt(content)}"
        if reply.status in BUSY or reply.status >= 500:
            raise Busy(text, pause=_seconds(reply.headers.get("Retry-After")))
        if reply.status != 200:
            raise Refused(text)
        try:
            read = orjson.loads(content)
        except orjson.JSONDecodeError:
            read = None
        if not isinstance(read, dict):
            raise RewardFailed(f"{url} answered, but not with a JSON object: {self._excerpt(content)}")
        return read

    def _excerpt(self, content: bytes) -> str:
        text = content.decode(errors="replace")
        return (text.replace(self._key, "(the key)") if self._key else text)[:LONGEST_TEXT]


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise BadRequest(f"the environment variable {variable}, which should hold the server's key, is not set")
    return os.environ[variable]


def _seconds(retry_after: str | None) -> float | None:
    return float(retry_after) if retry_after and retry_after.isdigit() else None
