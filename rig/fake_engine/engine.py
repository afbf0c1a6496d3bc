"""The fake engine as tests hold it: its state, its switches, what it has seen, and its life as a server."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web
from stepwell.steps.trainable import PROCESSED, RAW, UNKNOWN_MODE

from rig.chatml import render_chat
from rig.fake_engine.app import create_app
from rig.fake_engine.asking import Json, PauseMode
from rig.fake_engine.chat import Chat, Encode, Template
from rig.fake_engine.faults import Faults, FaultSwitch
from rig.fake_engine.generation import Generation
from rig.fake_engine.sampling import Reply
from rig.vocabulary import encode

REMEMBERED, REMEMBERED_GENERATIONS = 1000, 100


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
        plain: bool = False,
        version: str = "0.32.0",
        scale_out: bool = True,
        template: Template = render_chat,
        encode: Encode = encode,
        takes_prompt_ids: bool = True,
    ) -> None:
        self.is_plain = plain
        """It is a plain OpenAI server: none of vLLM's own routes, and its fields are refused."""

        self.version = version
        self.scale_out = scale_out
        """Without, /inference/v1/generate and derender are closed, as in a vLLM without --enable-scale-out."""

        self.template = template
        self.encode = encode
        """How a rendered chat becomes ids."""

        self.takes_prompt_ids = takes_prompt_ids
        """Without, a chat's prompt is always rendered from its messages, whatever ids it has."""

        self.tokenizes_first: list[int] = []
        """What /tokenize puts before the ids that a chat has."""

        self.model = model
        self.adapters: set[str] = set()
        """The names of the adapters that it serves beside."""
        self.max_model_len = max_model_len
        self.replies = deque(Reply(reply) if isinstance(reply, str) else reply for reply in replies)
        """Canned replies, one for each choice to come; when they run out, the hash takes over."""

        self.logprobs_mode = PROCESSED
        """What it says at a probe of its mode."""

        self.url = ""
        self.health_status = 200
        """What /health answers."""

        self.weight_version = "default"
        self.requests: deque[Seen] = deque(maxlen=REMEMBERED)
        """The last requests, oldest first, whatever their path; those under /fake are left out, and those that only
        ask how it is: without a body, to paths that take one or are there to be read."""

        self.generations: deque[Generation] = deque(maxlen=REMEMBERED_GENERATIONS)
        """The last ones that have ended: what was really sampled, for which prompt."""

        self.asked: Counter[str] = Counter()
        """How often each path was asked for, whatever for."""

        self.request_count = 0
        self.in_flight = 0
        self.ticks_passed = 0
        """How often a generation wrote its next token."""
        """Generations being answered now."""

        self.disconnects = 0
        """Generations whose client went away before the end."""

        self.listens = asyncio.Event()
        """Cleared: /weight_info and /is_paused do not answer, as while vLLM loads weights."""
        self.listens.set()

        self.speaks = asyncio.Event()
        """Set: a delay or a silence that faults ask for ends at once."""

        self._port = port
        self._switch = FaultSwitch()
        self._running = asyncio.Event()
        self._running.set()
        self._pause_mode: PauseMode = "keep"
        self._aborts = 0
        self._generating: dict[str, int] = {}
        """The generations that have begun to write, each with how often there had been an abort by then."""
        self._drained = asyncio.Event()

    @property
    def faults(self) -> Faults:
        return self._switch.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._switch.turn(faults)

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def rendered(self, body: Json) -> list[int]:
        """The prompt ids of a chat request's messages."""
        return Chat(self.template, encode=self.encode).render(body)

    def pause(self, mode: PauseMode = "keep") -> None:
        """As vLLM: generations in flight are held before their next token, run to their end, or end there with
        finish_reason "abort"; those that come later are held before their first."""
        self._pause_mode = mode
        self._aborts += mode == "abort"
        self._running.clear()

    async def drained(self) -> None:
        """Returns once no generation is in flight but those that are held before their first token."""
        while self._generating:
            self._drained.clear()
            await self._drained.wait()

    def note_end(self, generation: Generation) -> None:
        self.generations.append(generation)
        self._generating.pop(generation.id, None)
        self._drained.set()

    def resume(self) -> None:
        self._running.set()

    def deal_faults(self) -> Faults:
        return self._switch.deal()

    def next_replies(self, n: int) -> list[Reply | None]:
        return [self.replies.popleft() if self.replies else None for _ in range(n)]

    def likeliest_token(self, temperature: float) -> Json:
        """The answer to a probe of its log-probability mode, which is no request of an agent."""
        if self.logprobs_mode == UNKNOWN_MODE:
            return {"choices": [{"logprobs": None}]}
        logprob = -1.0 if self.logprobs_mode == RAW else -1.0 * temperature
        return {"choices": [{"logprobs": {"top_logprobs": [{"a": logprob}]}}]}

    def note(self, method: str, path: str, headers: dict[str, str], body: Json) -> None:
        self.asked[path] += 1
        if method == "GET" or (path == "/inference/v1/generate" and not body):
            return
        self.request_count += 1
        self.requests.append(Seen(method, path, headers, body))

    async def ticks(self, generation: Generation) -> AsyncIterator[int]:
        """One tick for each token to be sent: here time passes, pauses hold, and weights change in mid-reply."""
        for k in range(generation.longest()):
            await self._turn(generation, k)
            if self._generating[generation.id] != self._aborts:
                generation.abort(k)
                yield k
                return
            for output in generation.outputs:
                if k < len(output.ids):
                    output.versions.append(self.weight_version)
            self.ticks_passed += 1
            yield k

    async def be_silent(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.speaks.wait()

    async def _turn(self, generation: Generation, k: int) -> None:
        faults = generation.faults
        if k and faults.token_delay_s:
            await asyncio.sleep(faults.token_delay_s)
        if faults.silent_s and faults.silent_at_token == k:
            await self.be_silent(faults.silent_s)
        if faults.version_change_at_token == k:
            self.weight_version = faults.new_version
        if k == 0:
            await self._running.wait()
            self._generating[generation.id] = self._aborts
        elif self._pause_mode == "keep":
            await self._running.wait()

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
