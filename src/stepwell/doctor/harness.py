"""The real gateway in this process, over HTTP on loopback, with the engine behind it and a notebook for a pool.

So what is judged is what a gateway records, by the code that records it. A call that fails is an answer that says so.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import uvicorn

from stepwell.common.access_keys import AccessKeys
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.doctor.answer import Answer
from stepwell.doctor.detokenizer import Spelled, Speller
from stepwell.doctor.notebook import Notebook
from stepwell.doctor.replies import Heard, error_text, hear
from stepwell.engines.engine import BROKEN, explained
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.vllm import VllmControl
from stepwell.errors import EngineUnavailable, NotReady, SyncFailed
from stepwell.gateway.app import create_app
from stepwell.steps.step import JsonObject, Step
from stepwell.wire.openai import Upstream

LONGEST = 4096
"""Tokens of a prompt or a response: more than any case has."""
CALL_TIMEOUT = 120.0
CALLS = {Upstream.CHAT: "chat/completions", Upstream.COMPLETIONS: "completions"}


class Bench:
    def __init__(
        self, http: aiohttp.ClientSession, notebook: Notebook, speller: Speller, rescorer: VllmControl
    ) -> None:
        """`http` speaks to the gateway."""
        self._http = http
        self._notebook = notebook
        self._speller = speller
        self._rescorer = rescorer

    async def ask(self, upstream: Upstream, body: JsonObject, *, stream: bool = False) -> Answer:
        trajectory = await self._post("/init_trajectory", {})
        below = f"/{trajectory['trajectory_uid']}/{trajectory['prompt_uid']}/v1/"
        heard, failure = tuple[Heard, ...](), ""
        try:
            heard = await self._call(below + CALLS[upstream], {**body, "stream": stream})
        except EngineUnavailable as failed:
            failure = str(failed)
        await self._post(below + "complete_trajectory", {})
        steps = self._notebook.steps(trajectory["trajectory_uid"])
        spelled = tuple([await self.spell(step.response_ids.tolist()) for step in steps])
        return Answer(heard, steps, spelled, failure)

    async def spell(self, ids: Sequence[int]) -> Spelled | None:
        return await self._speller.spell(ids)

    async def rescored(self, step: Step) -> list[float] | str:
        """The log-probabilities of a step's response, as the engine gives them when asked again; or why it does not."""
        context = [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
        try:
            return (await asyncio.to_thread(self._rescorer.logprobs, context))[len(step.prompt_ids) - 1 :]
        except SyncFailed as failure:
            return str(failure)

    async def _call(self, path: str, body: JsonObject) -> tuple[Heard, ...]:
        try:
            async with self._http.post(path, json=body) as answer:
                text = await answer.text()
        except TimeoutError:
            raise EngineUnavailable(f"there was no answer within {CALL_TIMEOUT:g} s") from None
        except BROKEN as failure:
            raise EngineUnavailable(explained(failure)) from None
        return hear(text, streamed=bool(body["stream"]) and answer.status == 200)

    async def _post(self, path: str, body: JsonObject) -> Any:
        async with self._http.post(path, json=body) as answer:
            told = await answer.json()
        if answer.status != 200:
            raise NotReady(f"the doctor's own gateway failed at {path}: {error_text(told.get('error'))}")
        return told


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the doctor."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _any_port() -> socket.socket:
    """On loopback. asyncio spares a connection the 40 ms of Nagle's algorithm only if its socket is said to be TCP."""
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    door.bind(("127.0.0.1", 0))
    door.listen()  # who connects from now on is served once the gateway is up
    return door


@asynccontextmanager
async def open_bench(engine: str, key: str | None, tokenizer: Any, speller: Speller) -> AsyncIterator[Bench]:
    """`tokenizer` may be None: only an engine that gives no ids is in need of it."""
    notebook = Notebook()
    app = create_app(
        pool=notebook,
        engines=EngineFleet((engine,), api_key=key),
        tokenizer=BackgroundTokenizer("--tokenizer-path", lambda _: tokenizer),
        rewards=None,
        prompt_length=LONGEST,
        response_length=LONGEST,
        keys=AccessKeys(()),
    )
    server = _Server(uvicorn.Config(app, log_config=None, log_level="warning", access_log=False))
    with _any_port() as door:
        serving = asyncio.create_task(server.serve([door]))
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        try:
            async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(CALL_TIMEOUT)) as http:
                yield Bench(http, notebook, speller, VllmControl(engine, key=key, timeout=CALL_TIMEOUT))
        finally:
            server.should_exit = True
            await serving
