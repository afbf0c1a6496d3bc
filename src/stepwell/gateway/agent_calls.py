"""The way of one call: from an agent to an engine and back, recorded as it passes.

This is the path that every token takes, so it is plain ASGI, with nothing between the socket and these lines. What
always holds: an answer goes on as it comes; its step is with the recorder before the agent sees its end; a client that
leaves frees the engine, unless another waits for the same answer.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replies import EngineReply
from stepwell.errors import EngineUnavailable, Overloaded, StepwellError, TooLarge
from stepwell.gateway.continuation import Continuation
from stepwell.gateway.dialects.dialect import Kind, ModelCall, read_call
from stepwell.gateway.dialects.openai_choices import read_reply
from stepwell.gateway.dialects.sse import DONE, StreamReader
from stepwell.gateway.http.deduplication import CallHeaders, RequestDeduplicator, read_call_headers
from stepwell.gateway.http.error_responses import CONTEXT_OVERFLOW, relayed_parts
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.http.response_writer import KeepAlives, Message, ResponseWriter, Send
from stepwell.gateway.http.tracing import NoTracing
from stepwell.gateway.recording.recorded import CallContext
from stepwell.gateway.recording.step_builder import StepBuilder
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import Registration, TrajectoryRef
from stepwell.steps.step import Exactness, JsonObject
from stepwell.wire.openai import NO_USAGE, Sampled, Usage

log = logging.getLogger("stepwell.gateway")

Receive = Callable[[], Awaitable[Message]]

LARGEST_BODY = 64 * 1024 * 1024
TOO_LARGE = f"the request body is larger than {LARGEST_BODY >> 20} MiB"
MOST_IN_FLIGHT = 20_000
LINGER = 1.0
"""Seconds an engine has to close a stream that it said was done; after that its connection is not used again."""


async def read_body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        parts = [body]
        size = len(body)
        while message.get("more_body") and size <= LARGEST_BODY:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
        body = b"".join(parts)
    if len(body) > LARGEST_BODY:
        raise TooLarge(TOO_LARGE)
    return body


@dataclass(slots=True, eq=False)
class Exchange:
    """One call under way."""

    ref: TrajectoryRef
    call: ModelCall
    answer: ResponseWriter
    marks: CallHeaders
    started_at: float
    policy_version: int
    """As the pool knew it when the call began; it counts where the engine does not tell its own."""
    is_abandoned: bool = False
    """Its client left, and no one else waits for it."""
    is_over: bool = False
    is_answered: bool = False
    """It got its answer to the end, and that is no failure."""
    engine: str = ""
    """Address of the engine that answered."""
    prompt_tokens: int = 0
    response_tokens: int = 0

    def attributes(self) -> dict[str, str | int]:
        """What a trace says of it."""
        return {
            "engine": self.engine,
            "status": self.answer.status,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
        }

    def count(self, choices: Sequence[Sampled]) -> None:
        self.prompt_tokens = len(choices[0].prompt_ids) if choices else 0
        self.response_tokens = sum(len(choice.response_ids) for choice in choices)


class AgentCalls:
    """Chat completions and completions, of agents that have a base_url."""

    def __init__(
        self,
        *,
        pool: StepSink,
        engines: EngineFleet,
        known: KnownTrajectories,
        recording: StepBuilder,
        sight: GatewayMetrics,
        tracing: NoTracing,
        response_length: int,
    ) -> None:
        self.in_flight = 0
        self.keep_alives = KeepAlives()
        self._pool = pool
        self._engines = engines
        self._known = known
        self._recording = recording
        self._sight = sight
        self._tracing = tracing
        self._response_length = response_length
        self._clock = time.monotonic
        self._joins = RequestDeduplicator(self._clock)
        self._continuation = Continuation(engines)

    async def serve(self, scope: Message, receive: Receive, send: Send, ref: TrajectoryRef, kind: Kind) -> None:
        answer = ResponseWriter(send, self._clock)
        began, self.in_flight = answer.touched_at, self.in_flight + 1
        exchange = None
        try:
            if self.in_flight > MOST_IN_FLIGHT:
                raise Overloaded(f"{MOST_IN_FLIGHT} calls are in flight; try again in a moment")
            marks = read_call_headers(scope["headers"])
            raw = await read_body(receive)
            call = read_call(kind, raw, response_length=self._response_length, marked=marks.kind)
            await self._known.require(ref)
            exchange = Exchange(ref, call, answer, marks, time.time(), self._pool.policy_version)
            names = {"trajectory_uid": ref.trajectory_uid, "prompt_uid": ref.prompt_uid}
            with self._tracing.span(kind, marks.traceparent, **names) as span:
                await self._join_or_lead(exchange, receive, marks.key(ref.trajectory_uid, raw))
                span.set_attributes(exchange.attributes())
        except StepwellError as failure:
            await answer.fail(failure)
        finally:
            self.in_flight -= 1
            self._note(kind, answer, began, exchange)

    async def _join_or_lead(self, exchange: Exchange, receive: Receive, key: Hashable) -> None:
        task = asyncio.current_task()
        assert task is not None
        shared = self._joins.find(key)
        if shared is not None and not exchange.marks.may_join:
            await self._while_wanted(exchange, receive, self._converse(exchange), task.cancel)
        elif shared is not None:
            self._sight.call_joined(exchange.call.kind)
            shared.listeners += 1
            try:
                await self._while_wanted(exchange, receive, exchange.answer.follow(shared), task.cancel)
            finally:
                shared.leave()
        else:
            shared = self._joins.lead(key, task.cancel)
            exchange.answer.share(shared)
            try:
                await self._while_wanted(exchange, receive, self._converse(exchange), shared.leave)
            finally:
                keep = exchange.is_answered and exchange.marks.idempotency_key is not None
                self._joins.end(key, shared, keep=keep)

    async def _while_wanted(
        self, exchange: Exchange, receive: Receive, answering: Coroutine[Any, Any, None], leave: Callable[[], object]
    ) -> None:
        """Answer; `leave` is called when the client has gone before the end, and may cancel the answering."""
        watch = asyncio.create_task(_watch(exchange, receive, leave))
        try:
            await answering
        except StepwellError as failure:
            exchange.is_over = True
            await exchange.answer.fail(failure)
        except asyncio.CancelledError:
            if not exchange.is_abandoned:
                raise
            self._sight.client_gone(exchange.call.kind)
        finally:
            watch.cancel()

    async def _converse(self, exchange: Exchange) -> None:
        call, answer = exchange.call, exchange.answer
        if call.stream:
            self.keep_alives.add(answer)
        reply = None
        try:
            reply = await self._engines.send(call.kind.upstream, call.request, sticky=exchange.ref.trajectory_uid)
            exchange.engine = reply.engine.address
            if reply.status != 200:
                await self._refused(exchange, reply.status, await reply.read())
            elif call.stream:
                await self._stream(exchange, reply)
            else:
                await self._whole(exchange, reply)
        finally:
            if call.stream:
                self.keep_alives.discard(answer)
            if reply is not None:
                reply.close()

    def _context(self, exchange: Exchange, reply: EngineReply) -> CallContext:
        told = exchange.policy_version if reply.version_before is None else reply.version_before
        return self._recording.context(exchange.ref, exchange.call, reply.engine, told, exchange.started_at)

    async def _whole(self, exchange: Exchange, reply: EngineReply) -> None:
        context = self._context(exchange, reply)
        got = read_reply(await reply.read(), exchange.call, reply.engine.kind)
        if got.is_aborted:
            self._sight.call_continued(exchange.call.kind)
            got = await self._continuation.whole(exchange.call, got, reply.version_before)
        await self._keep(exchange, context, reply, got.choices, got.usage, got.texts)
        exchange.is_over = exchange.is_answered = True
        await exchange.answer.whole(200, got.body())

    async def _stream(self, exchange: Exchange, reply: EngineReply) -> None:
        context = self._context(exchange, reply)
        reader = StreamReader(exchange.call, reply.engine.kind)
        try:
            await _pass_on(reader, reply, exchange.answer)
            if not reader.is_whole:
                raise EngineUnavailable(f"the engine {reply.engine.address} broke off in mid-answer")
            choices, usage, end = await self._ended(exchange, reader, reply.version_before)
        except (asyncio.CancelledError, EngineUnavailable):
            self._recording.keep_cut(context, reader.sampled())
            raise
        if reader.error is not None:
            self._recording.keep_cut(context, choices)
        else:
            await self._keep(exchange, context, reply, choices, usage, reader.texts)
        exchange.is_over, exchange.is_answered = True, reader.error is None
        await exchange.answer.end(end + DONE)
        await _linger(reply)

    async def _ended(
        self, exchange: Exchange, reader: StreamReader, version: int | None
    ) -> tuple[list[Sampled], Usage, bytes]:
        """What was sampled in all, the engine's count of it, and what the agent has yet to be told."""
        if reader.error is not None:
            return reader.sampled(), reader.usage, b"data: " + reader.error + b"\n\n"
        if reader.is_aborted:
            self._sight.call_continued(exchange.call.kind)
            events, choices = await self._continuation.stream(exchange.call, reader, version)
            return choices, NO_USAGE, events
        return reader.sampled(), reader.usage, b""

    async def _keep(
        self,
        exchange: Exchange,
        context: CallContext,
        reply: EngineReply,
        choices: Sequence[Sampled],
        usage: Usage,
        texts: Callable[[], Sequence[str | None]],
    ) -> None:
        if context.exactness is Exactness.RETOKENIZED:
            choices = await self._recording.retokenize(exchange.call, choices, texts())
        exchange.count(choices)
        await self._recording.keep(context, reply.engine, choices, usage)

    async def _refused(self, exchange: Exchange, status: int, body: bytes) -> None:
        """The engine's refusal, passed on. A prompt that outgrew the window ends the episode: the pool is told."""
        status, body = relayed_parts(status, body)
        if CONTEXT_OVERFLOW.encode() in body:
            ref = exchange.ref
            why: JsonObject = {"ended_by": CONTEXT_OVERFLOW}
            with contextlib.suppress(StepwellError):
                await self._pool.register_trajectory(Registration(ref.trajectory_uid, ref.prompt_uid, metadata=why))
        exchange.is_over = True
        if exchange.answer.status:
            await exchange.answer.end(b"data: " + body + b"\n\n" + DONE)
        else:
            await exchange.answer.whole(status, body)

    def _note(self, kind: Kind, answer: ResponseWriter, began: float, exchange: Exchange | None) -> None:
        took, first = self._clock() - began, answer.first_byte_at
        prompt, response = (exchange.prompt_tokens, exchange.response_tokens) if exchange else (0, 0)
        self._sight.call_done(kind, answer.status, took, None if first is None else first - began, prompt, response)


async def _watch(exchange: Exchange, receive: Receive, leave: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not exchange.is_over:
        exchange.is_abandoned = True
        leave()


async def _pass_on(reader: StreamReader, reply: EngineReply, answer: ResponseWriter) -> None:
    """Until the engine says that it is done, or hangs up."""
    while not reader.done:
        data = await reply.next_bytes()
        out = reader.feed(data) if data else reader.end()
        if out:
            await answer.write(out)
        if not data:
            return


async def _linger(reply: EngineReply) -> None:
    """Read a done stream to its very end, so that its connection can be used again."""
    if reply.is_read:
        return
    with contextlib.suppress(TimeoutError, EngineUnavailable):
        async with asyncio.timeout(LINGER):
            while await reply.next_bytes():
                pass
