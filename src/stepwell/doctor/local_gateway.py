"""The real gateway in this process, on loopback, with the examined engine behind it and a pool of this process.

So the doctor judges what a gateway records, by the code that records it. A failed call becomes an answer with a reason.
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
from stepwell.doctor.replies import CHAT, Decode, ExaminedAnswer, ParsedReply, error_text, parse_reply
from stepwell.engines.engine import BROKEN, EngineControl, failure_text
from stepwell.engines.fleet import EngineFleet
from stepwell.errors import EngineUnavailable, NotReady, SyncFailed
from stepwell.gateway.app import GatewayApp
from stepwell.gateway.asgi import GatewayAsgi
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy
from stepwell.gateway.dialects.request_rules import RequestRules
from stepwell.gateway.requests import Message, Receive, Send
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.client import PoolClient
from stepwell.pool.client.in_process import start_in_process
from stepwell.steps.columns import unpack
from stepwell.steps.step import JsonObject, Step

LONGEST = 4096
"""Tokens of a response: more than any case uses, and room for a prompt in the engine's context."""
CALL_TIMEOUT = 120.0


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
        opened = await self._post("/init_trajectory", {})
        trajectory = TrajectoryRef(opened["trajectory_uid"], opened["prompt_uid"])
        await agent(Rollout(**opened, sample={}, attempt=0, gateway=self._gateway))
        calls = self._log.below(_root(trajectory))
        return ObservedAgent(calls, await self._end(trajectory))

    async def ask(self, path: str, body: JsonObject, *, stream: bool = False) -> ExaminedAnswer:
        trajectory = await self._open_trajectory()
        replies, failure = await self._call(trajectory, path, {**body, "stream": stream})
        return await self._examined(replies, await self._end(trajectory), failure)

    async def ask_in_turn(
        self, first: JsonObject, following: Callable[[ParsedReply], JsonObject], *, stream: bool = False
    ) -> tuple[ExaminedAnswer, ExaminedAnswer]:
        """Two chat calls of one trajectory. `following` makes the second, which may be streamed, of the first reply."""
        trajectory = await self._open_trajectory()
        replies, failure = await self._call(trajectory, CHAT, {**first, "stream": False})
        if failure or not replies:
            failed = await self._examined(replies, await self._end(trajectory), failure)
            return failed, ExaminedAnswer(failure=failure or "the first turn has no reply")
        later, failure = await self._call(trajectory, CHAT, {**following(replies[0]), "stream": stream})
        steps = await self._end(trajectory)
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

    async def _open_trajectory(self) -> TrajectoryRef:
        opened = await self._post("/init_trajectory", {})
        return TrajectoryRef(opened["trajectory_uid"], opened["prompt_uid"])

    async def _call(
        self, trajectory: TrajectoryRef, path: str, body: JsonObject
    ) -> tuple[tuple[ParsedReply, ...], str]:
        """The replies, or none and the reason."""
        try:
            async with self._http.post(_base(trajectory) + path, json=body) as answer:
                text = await answer.text()
            return parse_reply(text, streamed=bool(body["stream"]) and answer.status == 200, path=path), ""
        except TimeoutError:
            return (), f"there was no answer within {CALL_TIMEOUT:g} s"
        except (aiohttp.ClientError, *BROKEN) as failure:
            return (), failure_text(failure)
        except EngineUnavailable as failure:
            return (), str(failure)

    async def _end(self, trajectory: TrajectoryRef) -> tuple[Step, ...]:
        """Completes the trajectory, and returns its steps, all of which are in the pool then. With a reward, the pool
        also keeps a trajectory whose steps are all quarantined."""
        await self._post(_base(trajectory) + "complete_trajectory", {"reward": 0.0})
        return tuple(unpack(await self._pool.read([(trajectory.trajectory_uid, trajectory.prompt_uid)]), copy=False))

    async def _examined(
        self, replies: tuple[ParsedReply, ...], steps: tuple[Step, ...], failure: str
    ) -> ExaminedAnswer:
        decoded = tuple([await self.decode(step.response_ids.tolist()) for step in steps])
        return ExaminedAnswer(replies, steps, decoded, failure)

    async def _post(self, path: str, body: JsonObject) -> Any:
        async with self._http.post(path, json=body) as answer:
            parsed = await answer.json()
        if answer.status != 200:
            raise NotReady(f"the doctor's own gateway failed at {path}: {error_text(parsed.get('error'))}")
        return parsed


def _root(trajectory: TrajectoryRef) -> str:
    return f"/{trajectory.trajectory_uid}/{trajectory.prompt_uid}"


def _base(trajectory: TrajectoryRef) -> str:
    return f"{_root(trajectory)}/v1/"


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
                aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(CALL_TIMEOUT)) as http,
                GatewayClient(url) as gateway,
            ):
                yield LocalGateway(http, gateway, log, pool, decode, rescorer)
        finally:
            server.should_exit = True
            await serving
