"""The real gateway in this process, on loopback, with the examined engine behind it and a pool of this process; and the
calls of a case through it.

- So the doctor judges what a gateway records, by the code that records it. A failed call becomes an answer with a
reason. - A case makes the same request whole and streamed, with one seed, and has a finding for every column.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson
import uvicorn

from stepwell.access.access_keys import AccessKeys
from stepwell.agents.gateway_client import GatewayClient
from stepwell.agents.rollout import Rollout
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.doctor.findings import NOTHING, CaseCells, CaseColumn, Finding
from stepwell.doctor.replies import CHAT, Decode, ExaminedAnswer, ParsedReply, error_text, parse_reply
from stepwell.doctor.verdicts import (
    differing,
    judge_ids,
    judge_logprobs,
    judge_prefix,
    judge_rescored,
    judge_stream,
    judge_text,
    prefix_break,
)
from stepwell.engines.engine import BROKEN, EngineControl, failure_text
from stepwell.engines.fleet import EngineFleet
from stepwell.errors import EngineUnavailable, SyncFailed
from stepwell.gateway.app import GatewayApp
from stepwell.gateway.asgi import GatewayAsgi
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy
from stepwell.gateway.dialects.request_rules import RequestRules
from stepwell.gateway.requests import Message, Receive, Send
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.pool.client.in_process import start_in_process
from stepwell.steps.columns import unpack
from stepwell.steps.step import JsonObject, Step
from stepwell.wire.gateway_api import InitTrajectory, TrajectoryOpened

LONGEST = 4096
"""Tokens of a response: more than any case uses, and room for a prompt in the engine's context."""
CALL_TIMEOUT = 120.0
SEED = 7
SHORT = 32
"""Tokens of an ordinary answer."""
HELLO: dict[str, Any] = {"role": "user", "content": "Say hello, and how you are."}


@dataclass(slots=True)
class AgentCall:
    """A POST request to the gateway."""

    path: str
    """Below the agent's base_url."""
    status: int = 0
    """0 until it is answered."""
    refusal: bytes = b""
    """The body of an answer with an error."""

    def refusal_text(self) -> str:
        try:
            return f"{self.status}: {error_text(orjson.loads(self.refusal)['error'])}"
        except (ValueError, KeyError, TypeError):
            return f"{self.status}: {self.refusal[:80]!r}"


class CallLog:
    """An application before the gateway that notes what reaches it, also what is refused and so not recorded."""

    def __init__(self, app: GatewayAsgi) -> None:
        self._app = app
        self._calls: list[AgentCall] = []

    def below(self, base: str) -> list[AgentCall]:
        """The calls of the agent with this base_url, as far as they have come."""
        calls = (call for call in self._calls if call.path.startswith(base))
        return [replace(call, path=call.path.removeprefix(base)) for call in calls]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._calls.append(call := AgentCall(scope["path"]))

        async def note_answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            elif call.status >= 400:
                call.refusal += message.get("body", b"")
            await send(message)

        await self._app(scope, receive, note_answer)


@dataclass(frozen=True, slots=True)
class ObservedAgent:
    """A record of what an agent did in one trajectory."""

    calls: list[AgentCall]
    steps: tuple[Step, ...]


class LocalGateway:
    def __init__(
        self,
        http: aiohttp.ClientSession,
        gateway: GatewayClient,
        log: CallLog,
        pool: PoolClient,
        decode: Decode,
        rescorer: EngineControl | None,
    ) -> None:
        """`http` and `gateway` are connected to the gateway, whose calls are in `log`."""
        self.decode = decode
        self._http = http
        self._gateway = gateway
        self._log = log
        self._pool = pool
        self._rescorer = rescorer

    async def observe(self, agent: Callable[[Rollout], Awaitable[None]]) -> ObservedAgent:
        """Runs an agent as a flow does, in a trajectory of its own."""
        opened = await self._open()
        await agent(Rollout(**opened.model_dump(), sample={}, attempt=0, gateway=self._gateway))
        return ObservedAgent(self._log.below(f"/{_ref(opened)}"), await self._end(opened))

    async def ask(self, path: str, body: JsonObject, *, stream: bool = False) -> ExaminedAnswer:
        opened = await self._open()
        replies, failure = await self._call(opened, path, {**body, "stream": stream})
        return await self._examined(replies, await self._end(opened), failure)

    async def ask_in_turn(
        self, first: JsonObject, following: Callable[[ParsedReply], JsonObject], *, stream: bool = False
    ) -> tuple[ExaminedAnswer, ExaminedAnswer]:
        """Two chat calls of one trajectory. `following` makes the second, which may be streamed, of the first reply."""
        opened = await self._open()
        replies, failure = await self._call(opened, CHAT, {**first, "stream": False})
        if failure or not replies:
            failed = await self._examined(replies, await self._end(opened), failure)
            return failed, ExaminedAnswer(failure=failure or "the first turn has no reply")
        later, failure = await self._call(opened, CHAT, {**following(replies[0]), "stream": stream})
        steps = await self._end(opened)
        return await self._examined(replies, steps[:1], ""), await self._examined(later, steps[1:], failure)

    async def rescored(self, step: Step) -> list[float] | str:
        """The log-probabilities of a step's response, computed by the engine again, or the reason why not."""
        if self._rescorer is None:
            return "the engine cannot score given tokens"
        context = [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
        try:
            return (await asyncio.to_thread(self._rescorer.logprobs, context))[len(step.prompt_ids) - 1 :]
        except SyncFailed as failure:
            return str(failure)

    async def _open(self) -> TrajectoryOpened:
        return await self._gateway.open_trajectory(InitTrajectory())

    async def _call(self, opened: TrajectoryOpened, path: str, body: JsonObject) -> tuple[tuple[ParsedReply, ...], str]:
        """The replies, or none and the reason."""
        try:
            async with self._http.post(f"{opened.base_url}/{path}", json=body) as answer:
                text = await answer.text()
            return parse_reply(text, streamed=bool(body["stream"]) and answer.status == 200, path=path), ""
        except TimeoutError:
            return (), f"there was no answer within {CALL_TIMEOUT:g} s"
        except (aiohttp.ClientError, *BROKEN) as failure:
            return (), failure_text(failure)
        except EngineUnavailable as failure:
            return (), str(failure)

    async def _end(self, opened: TrajectoryOpened) -> tuple[Step, ...]:
        """Completes the trajectory, and returns its steps, all of which are in the pool then. With a reward, the pool
        also keeps a trajectory whose steps are all quarantined."""
        await self._gateway.complete_trajectory(_ref(opened), 0.0)
        return tuple(unpack(await self._pool.read([(opened.trajectory_uid, opened.prompt_uid)]), copy=False))

    async def _examined(
        self, replies: tuple[ParsedReply, ...], steps: tuple[Step, ...], failure: str
    ) -> ExaminedAnswer:
        decoded = tuple([await self.decode(step.response_ids.tolist()) for step in steps])
        return ExaminedAnswer(replies, steps, decoded, failure)


def _ref(opened: TrajectoryOpened) -> str:
    return f"{opened.trajectory_uid}/{opened.prompt_uid}"


class _Server(uvicorn.Server):
    """Installs no signal handlers: signals belong to the doctor's process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen() -> socket.socket:
    """Listens on a free port of loopback. asyncio switches off Nagle's algorithm (40 ms) only for a socket of protocol
    TCP."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # a connection made from now on waits until the gateway is up
    return listener


@asynccontextmanager
async def open_local_gateway(
    engine: str, key: str | None, tokenizer: Any, decode: Decode, rescorer: EngineControl | None
) -> AsyncIterator[LocalGateway]:
    """`tokenizer` may be None: the gateway needs one only for an engine that returns no ids. The gateway bridges, which
    matters only to calls of one trajectory."""
    pool = start_in_process(PoolPlan())
    app = GatewayApp(
        pool=pool,
        engines=EngineFleet((engine,), api_key=key),
        tokenizer=BackgroundTokenizer("--tokenizer-path", lambda _: tokenizer),
        rewards=None,
        prompt_length=sys.maxsize,
        response_length=LONGEST,
        keys=AccessKeys(()),
        bridge=ThinkingPolicy.TEMPLATE,
        rules=RequestRules(frozenset(("structured_outputs",))),
    ).asgi()
    log = CallLog(app)
    server = _Server(uvicorn.Config(log, log_config=None, log_level="warning", access_log=False))
    with _listen() as listener:
        serving = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CALL_TIMEOUT)) as http,
                GatewayClient(url) as gateway,
            ):
                yield LocalGateway(http, gateway, log, pool, decode, rescorer)
        finally:
            server.should_exit = True
            await serving


@dataclass(frozen=True, slots=True)
class CaseAnswers:
    """One request, answered whole and streamed."""

    whole: ExaminedAnswer
    streamed: ExaminedAnswer
    again: ExaminedAnswer | None
    """The whole answer a second time, if the other two differ."""


class CaseRunner:
    def __init__(self, gateway: LocalGateway, model: str) -> None:
        self.gateway = gateway
        self._model = model

    async def ask(self, path: str = CHAT, **fields: Any) -> ExaminedAnswer:
        """One whole answer."""
        return await self.gateway.ask(path, self._body(fields))

    async def ask_twice(self, path: str = CHAT, **fields: Any) -> CaseAnswers:
        body = self._body(fields)
        return await _twice(lambda stream: self.gateway.ask(path, body, stream=stream))

    async def continue_twice(
        self, first: JsonObject, following: Callable[[ParsedReply], JsonObject]
    ) -> tuple[ExaminedAnswer, CaseAnswers]:
        """The first turn of a conversation, and its second turn, which `following` makes of the first reply."""
        firsts: list[ExaminedAnswer] = []

        async def ask(stream: bool) -> ExaminedAnswer:
            turn, after = await self.gateway.ask_in_turn(
                self._body(first), lambda reply: self._body(following(reply)), stream=stream
            )
            firsts.append(turn)
            return after

        answers = await _twice(ask)
        return firsts[0], answers

    async def judge(
        self,
        answers: CaseAnswers,
        *,
        stop: str = "",
        expected: str | None = None,
        prefix: Finding = NOTHING,
        rescored: Finding | None = None,
    ) -> CaseCells:
        """`stop` is the stop string, `expected` the only text that the grammar allows."""
        whole = answers.whole
        if rescored is None:
            rescored = judge_rescored(whole, [await self.gateway.rescored(step) for step in whole.steps])
        return {
            CaseColumn.IDS: judge_ids(whole),
            CaseColumn.LOGPROBS: judge_logprobs(whole),
            CaseColumn.TEXT: judge_text(whole, stop=stop, expected=expected),
            CaseColumn.STREAM: judge_stream(whole, answers.streamed, answers.again, stop=stop),
            CaseColumn.PREFIX: prefix,
            CaseColumn.RESCORED: rescored,
        }

    async def prefix(self, first: ExaminedAnswer, second: ExaminedAnswer) -> Finding:
        """Whether the second prompt starts with the whole first step. Each answer has one step."""
        if not second.steps or not first.steps:
            return NOTHING
        turn, after = first.steps[0], second.steps[0]
        if (at := prefix_break(turn, after)) is None:
            return judge_prefix(turn, after, ("", ""))
        turn_ids = [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]
        decoded = [await self.gateway.decode(ids[at:]) for ids in (turn_ids, after.prompt_ids.tolist())]
        before, later = (found.text if found else "" for found in decoded)
        return judge_prefix(turn, after, (before, later))

    def _body(self, fields: JsonObject) -> JsonObject:
        """A field that is None is left out."""
        body = {"model": self._model, "max_tokens": SHORT, "seed": SEED, **fields}
        return {name: value for name, value in body.items() if value is not None}


async def _twice(ask: Callable[[bool], Awaitable[ExaminedAnswer]]) -> CaseAnswers:
    """`ask` is told whether to stream."""
    whole, streamed = await ask(False), await ask(True)
    differs = whole.is_sound and streamed.is_sound and differing(whole, streamed)
    return CaseAnswers(whole, streamed, await ask(False) if differs else None)


def judge_only(answer: ExaminedAnswer) -> CaseCells:
    """The cells of a case that ended after its first answer."""
    return {CaseColumn.IDS: judge_ids(answer), CaseColumn.LOGPROBS: judge_logprobs(answer)}
