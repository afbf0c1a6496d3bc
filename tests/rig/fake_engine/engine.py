"""The fake engine as tests hold it: its state, its switches, what it has seen, and its life as a server."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from tests.rig.fake_engine.app import create_app
from tests.rig.fake_engine.asking import Json
from tests.rig.fake_engine.faults import Faults, FaultSwitch
from tests.rig.fake_engine.generation import Generation
from tests.rig.fake_engine.sampling import Reply

REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived; `path` includes its query."""

    method: str
    path: str
    headers: dict[str, str]
    body: Json
    """Empty where there was none."""


class FakeEngine:
    """A server that speaks like vLLM and samples by hashing. Open it with `async with`; `url` is valid inside.

    It lives in one event loop. Another thread may read its counters and set its `faults` and `weight_version`; pausing
    it from there goes over HTTP.
    """

    def __init__(
        self,
        *,
        model: str = "tiny",
        max_model_len: int = 32_768,
        replies: Sequence[str | Reply] = (),
        port: int = 0,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.replies = deque(Reply(reply) if isinstance(reply, str) else reply for reply in replies)
        """Canned replies, one for each choice to come; when they run out, the hash takes over."""

        self.url = ""
        self.weight_version = "default"
        self.requests: deque[Seen] = deque(maxlen=REMEMBERED)
        """The last requests, oldest first, whatever their path; those under /fake are left out."""

        self.request_count = 0
        self.in_flight = 0
        """Generations being answered now."""

        self.disconnects = 0
        """Generations whose client went away before the end."""

        self._port = port
        self._switch = FaultSwitch()
        self._running = asyncio.Event()
        self._running.set()

    @property
    def faults(self) -> Faults:
        return self._switch.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._switch.turn(faults)

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def pause(self) -> None:
        """Hold every generation before its next token, as vLLM's mode=keep does."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def deal_faults(self) -> Faults:
        return self._switch.deal()

    def next_replies(self, n: int) -> list[Reply | None]:
        return [self.replies.popleft() if self.replies else None for _ in range(n)]

    def note(self, method: str, path: str, headers: dict[str, str], body: Json) -> None:
        self.request_count += 1
        self.requests.append(Seen(method, path, headers, body))

    async def ticks(self, generation: Generation) -> AsyncIterator[int]:
        """One tick for each token to be sent: here time passes, pauses hold, and weights change in mid-reply."""
        faults = generation.faults
        for k in range(generation.longest()):
            if k and faults.token_delay_s:
                await asyncio.sleep(faults.token_delay_s)
            if faults.version_change_at_token == k:
                self.weight_version = faults.new_version
            await self._running.wait()
            for output in generation.outputs:
                if k < len(output.ids):
                    output.versions.append(self.weight_version)
            yield k

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(create_app(self), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
