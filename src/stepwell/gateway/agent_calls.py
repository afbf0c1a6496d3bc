"""One call of an agent: dialect in, engine, dialect out, step recorded.

Every token takes this path, so it is plain ASGI without a framework.

- An answer is passed on as it arrives. Its step is in the outbox before the agent sees the end of the answer.
- If a client leaves, its engine is freed, unless another client waits for the same answer.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replies import EngineReply
from stepwell.errors import EngineUnavailable, Overloaded, StepwellError
from stepwell.gateway.continuation import Continuation
from stepwell.gateway.dialects.dialect import CallSurroundings, Dialect, ModelCall, StreamWriter
from stepwell.gateway.dialects.openai_choices import ChoicesStream, read_reply
from stepwell.gateway.dialects.side_calls import side_call_kind
from stepwell.gateway.dialects.sse import EventReader
from stepwell.gateway.http.deduplication import CallHeaders, RequestDeduplicator, read_call_headers
from stepwell.gateway.http.error_responses import (
    CONTEXT_OVERFLOW,
    ErrorDetails,
    describe_refusal,
    describe_stream_error,
    describe_unforeseen,
    openai_error,
)
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.http.request_body import Message, Receive, Send, read_body
from stepwell.gateway.http.response_writer import KeepAlives, ResponseWriter
from stepwell.gateway.http.tracing import NoTracing
from stepwell.gateway.recording.step_builder import CallContext, StepBuilder
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import Registration, TrajectoryRef
from stepwell.steps.step import JsonObject
from stepwell.wire.openai import NO_USAGE, Sampled, Usage

MAX_IN_FLIGHT = 20_000
CLOSE_TIMEOUT = 1.0
"""Seconds in which an engine must close a stream after [DONE]; otherwise its connection is not used again."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One call in flight."""

    ref: TrajectoryRef
    call: ModelCall
    writer: ResponseWriter
    headers: CallHeaders
    untrainable: str | None
    started_at: float
    policy_version: int
    """As the pool knew it when the call began; used if the engine does not tell its own."""
    stream: StreamWriter
    is_abandoned: bool = False
    """The client left, and no other client waits for the answer."""
    is_over: bool = False
    is_answered: bool = False
    """The whole answer was sent, and it is not an error."""
    engine: str = ""
    """The address of the engine that answered."""
    prompt_tokens: int = 0
    response_tokens: int = 0

    def attributes(self) -> dict[str, str | int]:
        """For the trace."""
        return {
            "engine": self.engine,
            "status": self.writer.status,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
        }

    async def fail(self, error: ErrorDetails) -> None:
        self.is_over = True
        await send_error(self.writer, self.call.dialect, error, self.stream)


async def send_error(
    writer: ResponseWriter, dialect: Dialect | None, error: ErrorDetails, stream: StreamWriter | None = None
) -> None:
    """As an HTTP error; as an error event if a stream has begun; not at all if the response has ended."""
    body = dialect.error(error) if dialect else openai_error(error)
    if not writer.status:
        await writer.whole(error.status, body, error.headers)
    elif not writer.is_ended and stream is not None:
        await writer.end(stream.fail(body))


class AgentCalls:
    """The calls of agents that have a base_url, in any dialect."""

    def __init__(
        self,
        *,
        pool: StepSink,
        engines: EngineFleet,
        known: KnownTrajectories,
        steps: StepBuilder,
        metrics: GatewayMetrics,
        tracing: NoTracing,
        around: CallSurroundings,
        keep_alives: KeepAlives,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self.in_flight = 0
        self._pool = pool
        self._engines = engines
        self._known = known
        self._steps = steps
        self._metrics = metrics
        self._tracing = tracing
        self._around = around
        self._keep_alives = keep_alives
        self._max_in_flight = max_in_flight
        self._clock = time.monotonic
        self._deduplicator = RequestDeduplicator(self._clock)
        self._continuation = Continuation(engines)

    async def serve(self, scope: Message, receive: Receive, send: Send, ref: TrajectoryRef, dialect: Dialect) -> None:
        writer = ResponseWriter(send, self._clock)
        began, self.in_flight = writer.touched_at, self.in_flight + 1
        exchange = None
        try:
            if self.in_flight > self._max_in_flight:
                raise Overloaded(f"{self._max_in_flight} calls are in flight; try again in a moment")
            headers = read_call_headers(scope["headers"])
            raw = await read_body(receive)
            call = dialect.read(raw, self._around)
            side = side_call_kind(call.texts, call.request["max_tokens"], headers.kind)
            await self._known.require(ref)
            exchange = Exchange(
                ref=ref,
                call=call,
                writer=writer,
                headers=headers,
                untrainable=f"side_call: {side}" if side else call.untrainable,
                started_at=time.time(),
                policy_version=self._pool.policy_version,
                stream=dialect.stream(call),
            )
            names = {"trajectory_uid": ref.trajectory_uid, "prompt_uid": ref.prompt_uid}
            with self._tracing.span(dialect.name, headers.traceparent, **names) as span:
                await self._join_or_lead(exchange, receive, headers.key(ref.trajectory_uid, raw))
                span.set_attributes(exchange.attributes())
        except Exception as failure:  # noqa: BLE001 - whatever it is, the agent gets an answer in its dialect
            error = describe_unforeseen(failure, f"a call of trajectory {ref.trajectory_uid}")
            await send_error(writer, dialect, error, exchange.stream if exchange else None)
        finally:
            self.in_flight -= 1
            self._count(dialect, writer, began, exchange)

    async def _join_or_lead(self, exchange: Exchange, receive: Receive, key: Hashable) -> None:
        task = asyncio.current_task()
        assert task is not None
        shared = self._deduplicator.find(key)
        if shared is not None and not exchange.headers.may_join:
            await self._while_wanted(exchange, receive, self._answer(exchange), task.cancel)
        elif shared is not None:
            self._metrics.calls_joined[exchange.call.dialect.name].inc()
            shared.listeners += 1
            try:
                await self._while_wanted(exchange, receive, exchange.writer.follow(shared), task.cancel)
            finally:
                shared.leave()
        else:
            shared = self._deduplicator.lead(key, task.cancel)
            exchange.writer.share(shared)
            try:
                await self._while_wanted(exchange, receive, self._answer(exchange), shared.leave)
            finally:
                keep = exchange.is_answered and exchange.headers.idempotency_key is not None
                self._deduplicator.end(key, shared, keep=keep)

    async def _while_wanted(
        self, exchange: Exchange, receive: Receive, answering: Coroutine[Any, Any, None], leave: Callable[[], object]
    ) -> None:
        """Answer. If the client leaves before the end, `leave` is called; it may cancel the answering."""
        watch = asyncio.create_task(_watch_client(exchange, receive, leave))
        try:
            await answering
        except asyncio.CancelledError:
            if not exchange.is_abandoned:
                raise
            self._metrics.clients_gone[exchange.call.dialect.name].inc()
        except Exception as failure:  # noqa: BLE001 - those who joined the call get the answer too
            await exchange.fail(describe_unforeseen(failure, f"a call of trajectory {exchange.ref.trajectory_uid}"))
        finally:
            watch.cancel()

    async def _answer(self, exchange: Exchange) -> None:
        call, writer = exchange.call, exchange.writer
        if call.stream:
            writer.media_type = exchange.stream.media_type
            self._keep_alives.add(writer, exchange.stream.keep_alive)
        reply = None
        try:
            reply = await self._engines.send(call.upstream, call.request, sticky=exchange.ref.trajectory_uid)
            exchange.engine = reply.engine.address
            if reply.status != 200:
                await self._refuse(exchange, describe_refusal(reply.status, await reply.read()))
            elif call.stream:
                await self._stream(exchange, reply)
            else:
                await self._whole(exchange, reply)
        finally:
            if call.stream:
                self._keep_alives.discard(writer)
            if reply is not None:
                reply.close()

    def _context(self, exchange: Exchange, reply: EngineReply) -> CallContext:
        return self._steps.context(
            exchange.ref, exchange.call, reply, exchange.policy_version, exchange.started_at, exchange.untrainable
        )

    async def _whole(self, exchange: Exchange, reply: EngineReply) -> None:
        call, context = exchange.call, self._context(exchange, reply)
        answer = read_reply(await reply.read(), reply.engine.kind, keep_ids=call.wants.ids)
        if answer.is_aborted:
            self._metrics.calls_continued[call.dialect.name].inc()
            answer = await self._continuation.whole(call, answer, reply.version_before)
        await self._record(exchange, context, reply, answer.choices, answer.usage, answer.texts)
        body = call.dialect.reply(call, answer)
        exchange.is_over = exchange.is_answered = True
        await exchange.writer.whole(200, body)

    async def _stream(self, exchange: Exchange, reply: EngineReply) -> None:
        call, context = exchange.call, self._context(exchange, reply)
        answer = ChoicesStream(reply.engine.kind, keep_ids=call.wants.ids)
        try:
            await _pass_on(answer, reply, exchange)
            if not answer.is_whole:
                raise EngineUnavailable(f"the engine {reply.engine.address} broke off in mid-answer")
            choices, usage, rest = answer.sampled(), answer.usage, b""
            if answer.error is not None:
                rest = exchange.stream.fail(call.dialect.error(describe_stream_error(answer.error)))
            elif answer.is_aborted:
                self._metrics.calls_continued[call.dialect.name].inc()
                chunks, choices = await self._continuation.stream(call, answer, reply.version_before)
                rest, usage = b"".join(map(exchange.stream.chunk, chunks)), NO_USAGE
        except (asyncio.CancelledError, EngineUnavailable):
            self._steps.record_cut_short(context, answer.sampled())
            raise
        if answer.error is not None:
            self._steps.record_cut_short(context, choices)
        else:
            await self._record(exchange, context, reply, choices, usage, answer.texts)
            rest += exchange.stream.finish(usage)
        exchange.is_over, exchange.is_answered = True, answer.error is None
        await exchange.writer.end(rest)
        await _read_to_end(reply)

    async def _record(
        self,
        exchange: Exchange,
        context: CallContext,
        reply: EngineReply,
        choices: Sequence[Sampled],
        usage: Usage,
        texts: Callable[[], Sequence[str | None]],
    ) -> None:
        choices = await self._steps.with_ids(context, exchange.call, choices, texts)
        exchange.prompt_tokens = len(choices[0].prompt_ids) if choices else 0
        exchange.response_tokens = sum(len(choice.response_ids) for choice in choices)
        await self._steps.record(context, reply.engine, choices, usage)

    async def _refuse(self, exchange: Exchange, error: ErrorDetails) -> None:
        """Pass an engine's refusal on. A prompt longer than the model's context ends the episode: the pool is told."""
        if error.code == CONTEXT_OVERFLOW:
            ref = exchange.ref
            why: JsonObject = {"ended_by": CONTEXT_OVERFLOW}
            with contextlib.suppress(StepwellError):
                await self._pool.register_trajectory(Registration(ref.trajectory_uid, ref.prompt_uid, metadata=why))
        await exchange.fail(error)

    def _count(self, dialect: Dialect, writer: ResponseWriter, began: float, exchange: Exchange | None) -> None:
        took, first = self._clock() - began, writer.first_byte_at
        prompt, response = (exchange.prompt_tokens, exchange.response_tokens) if exchange else (0, 0)
        first_byte = None if first is None else first - began
        self._metrics.call_done(dialect.name, writer.status, took, first_byte, prompt, response)


async def _watch_client(exchange: Exchange, receive: Receive, leave: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not exchange.is_over:
        exchange.is_abandoned = True
        leave()


async def _pass_on(answer: ChoicesStream, reply: EngineReply, exchange: Exchange) -> None:
    """Pass events on until the engine sends [DONE] or closes the stream."""
    events, write_chunk, write = EventReader(), exchange.stream.chunk, exchange.writer.write
    while not answer.done:
        data = await reply.next_bytes()
        out = b""
        for payload in events.feed(data) if data else events.end():
            chunk = answer.read(payload)
            if chunk is not None:
                out += write_chunk(chunk)
        if out:
            await write(out)
        if not data:
            return


async def _read_to_end(reply: EngineReply) -> None:
    """Read a stream to its end after [DONE], so that its connection can be used again."""
    if reply.is_read:
        return
    with contextlib.suppress(TimeoutError, EngineUnavailable):
        async with asyncio.timeout(CLOSE_TIMEOUT):
            while await reply.next_bytes():
                pass
