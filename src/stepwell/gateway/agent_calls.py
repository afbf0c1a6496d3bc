"""One call of an agent: dialect in, engine, dialect out, step recorded.

Every token takes this path, so it is plain ASGI without a framework.

- An answer is passed on as it arrives. Its step is in the outbox before the agent sees the end of the answer.
- If a client leaves, its engine is freed, unless another client waits for the same answer.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from stepwell.access.caller import Caller
from stepwell.common.async_calls import run_to_end
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replies import EngineReply
from stepwell.errors import EngineUnavailable, Overloaded, StepwellError
from stepwell.gateway.bridge.bridge import Bridge
from stepwell.gateway.bridge.outcomes import BridgeOutcome
from stepwell.gateway.bridge.parents import Turn
from stepwell.gateway.call_book import CallBook
from stepwell.gateway.call_placement import CallPlace, CallPlacement, session_key_of
from stepwell.gateway.channel_routing import ChannelRouting
from stepwell.gateway.continuation import Continuation
from stepwell.gateway.dialects.dialect import CallSurroundings, Dialect, ModelCall
from stepwell.gateway.dialects.markers import writes_markers
from stepwell.gateway.dialects.openai_choices import ChoicesReply, ChoicesStream, read_reply
from stepwell.gateway.dialects.request_sampling import SamplingPolicy, policy_for, told_sampling
from stepwell.gateway.dialects.side_calls import side_call_kind
from stepwell.gateway.dialects.sse import EventReader
from stepwell.gateway.exchange import Exchange, send_error
from stepwell.gateway.http.client_watch import Client, watch_client
from stepwell.gateway.http.deduplication import CAPTURE_HEADER, CallHeaders, RequestDeduplicator, read_call_headers
from stepwell.gateway.http.error_responses import (
    CONTEXT_OVERFLOW,
    ErrorDetails,
    describe_refusal,
    describe_stream_error,
    describe_unforeseen,
)
from stepwell.gateway.http.metrics import GatewayMetrics, RemovedFields, ReplacedSampling
from stepwell.gateway.http.quotas import CallInFlight, CallQuotas
from stepwell.gateway.http.request_body import Message, Receive, Send, declared_length
from stepwell.gateway.http.response_writer import KeepAlives, ResponseWriter
from stepwell.gateway.http.sighting import Sighting, handover_of, is_handed_over
from stepwell.gateway.http.tracing import Tracing
from stepwell.gateway.recording.step_builder import NO_ORIGIN, BegunStep, PromptOrigin, StepBuilder
from stepwell.gateway.stored_conversations import StoredConversations, store_turn
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.gateway.unrecorded_calls import (
    NO_TRAJECTORY,
    UNRECORDED_HEADER,
    Unrecorded,
    add_origins,
    as_uncaptured,
    as_unrecorded,
    require_consistent,
)
from stepwell.pool.api.producing import CONTINUED, ENDED_BY, TRAIN, Registration, TrajectoryRef
from stepwell.pool.client import PoolClient
from stepwell.steps.conversation import MARKERS_IN_TEXT
from stepwell.steps.sampling import SIDE_CALL, LeftOutLog
from stepwell.steps.step import Json, Step
from stepwell.steps.step_filter import NOT_CONTINUED
from stepwell.wire.openai import NO_USAGE, Sampled, Usage

MAX_IN_FLIGHT = 20_000
TRAJECTORY_HEADER = b"x-stepwell-trajectory"
"""In the answer to a call whose URL names no trajectory: `trajectory_uid/prompt_uid`, for its feedback."""
SAMPLING_HEADER = b"x-stepwell-sampling"
"""In an answer that was sampled otherwise than its call asks: what is in force, and what was asked for."""
WHITEBOX = CallPlace(NO_TRAJECTORY, "", "", Unrecorded.URL)
MALFORMED_HISTORY = "malformed_history"
"""In a step's extras: how many tool calls in its history had arguments that are not a JSON object."""
CLOSE_TIMEOUT = 1.0
"""Seconds in which an engine must close a stream after [DONE]; otherwise its connection is not used again."""


@dataclass(slots=True, kw_only=True)
class AgentCalls:
    """Calls in any dialect: of agents, which have a base_url, and unrecorded ones."""

    pool: PoolClient
    engines: EngineFleet
    known: KnownTrajectories
    placement: CallPlacement
    steps: StepBuilder
    metrics: GatewayMetrics
    tracing: Tracing | None
    around: CallSurroundings
    sampling: Mapping[str, SamplingPolicy]
    """By channel; what `policy_for` makes of it counts."""
    other_models: Sequence[str]
    """What agents may name beside the trained model."""
    marked_side_calls: Collection[str]
    """Channels in which a side call is one by its header only, not by its text."""
    left_out: LeftOutLog
    keep_alives: KeepAlives
    bridge: Bridge | None = None
    """None: engines render every prompt."""
    max_in_flight: int = MAX_IN_FLIGHT
    in_flight: int = 0
    continuation: Continuation = field(init=False)
    channels: ChannelRouting = field(init=False)
    stored: StoredConversations = field(init=False)
    quotas: CallQuotas = field(default_factory=CallQuotas)
    book: CallBook
    removed: RemovedFields = field(init=False)
    replaced: ReplacedSampling = field(init=False)
    deduplicator: RequestDeduplicator = field(default_factory=lambda: RequestDeduplicator(time.monotonic))

    _surroundings: dict[tuple[str, bool, str], CallSurroundings] = field(default_factory=dict)
    """By channel, whether the call is a rollout's, and trained model."""

    def __post_init__(self) -> None:
        self.continuation = Continuation(self.engines)
        self.channels = ChannelRouting(self.pool, self.engines.hold)
        self.stored = StoredConversations(self.pool, self.steps.outbox)
        self.removed = RemovedFields(self.metrics)
        self.replaced = ReplacedSampling(self.metrics)

    async def serve(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        ref: TrajectoryRef,
        dialect: Dialect,
        caller: Caller,
        *,
        is_whitebox: bool = False,
    ) -> None:
        """A call of NO_TRAJECTORY belongs to a session of the caller, or to the trajectory that its header names. If it
        is a white-box one, it is not recorded on purpose."""
        writer = ResponseWriter(send, time.monotonic)
        writer.handover = handover_of(scope)
        opener = caller if ref == NO_TRAJECTORY and not is_whitebox else None
        kind = f"whitebox_{dialect.name}" if is_whitebox else dialect.name
        began = writer.touched_at
        exchange = None
        try:
            headers = read_call_headers(scope["headers"])
            if not headers.is_captured and not caller.may_opt_out:
                headers = replace(headers, is_captured=True)
                self.metrics.opt_outs_ignored.inc()
                writer.headers.append((CAPTURE_HEADER, b"on"))
            with self.admit(scope, ref, caller) as use:
                raw = await use.body(receive)
                if is_whitebox:
                    placed, call = WHITEBOX, as_unrecorded(dialect.read(raw, self.around))
                else:
                    placed, call = await self._placed(ref, opener, headers, dialect, raw)
                    ref = placed.ref
                    call = await self.channels.route(call, placed.channel, self._trained_model)
                if placed.unrecorded is not None:
                    self.metrics.calls_unrecorded[placed.unrecorded].inc()
                    if placed.unrecorded is not Unrecorded.DELETED:
                        writer.headers.append((UNRECORDED_HEADER, placed.unrecorded.encode()))
                if call.removed:
                    self.removed.note(call.removed)
                if call.replaced:
                    told = told_sampling(call.request, call.replaced)
                    self.replaced.note(placed.channel, call.replaced, told)
                    writer.headers.append((SAMPLING_HEADER, told.encode()))
                begun = self._begin(call, placed, headers, raw)
                sighting, key = Sighting(partial(self._mark, placed.ref)), headers.shared_key(raw)
                exchange = Exchange(
                    kind, placed, call, begun, writer, headers, dialect.stream(call), sighting, key, is_whitebox
                )
                if opener is not None and (shown := placed.shown) is not None:
                    writer.headers.append((TRAJECTORY_HEADER, f"{shown.trajectory_uid}/{shown.prompt_uid}".encode()))
                with self.known.call_of(ref):
                    name = caller.quota_name or ref.trajectory_uid
                    await self._join_or_lead(exchange, Client(scope, receive), headers.key(ref, raw), name)
                use.use(exchange.prompt_tokens + exchange.response_tokens)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the agent gets an answer in its dialect
            error = describe_unforeseen(failure, f"a call of trajectory {ref.trajectory_uid}")
            self.metrics.calls_refused[kind, error.code].inc()
            await send_error(writer, dialect, error, exchange.stream if exchange else None)
        finally:
            self._count(kind, writer, began, exchange)

    @contextlib.contextmanager
    def admit(self, scope: Message, ref: TrajectoryRef, caller: Caller) -> Iterator[CallInFlight]:
        """A call in flight, which takes from the quota of its caller. Overloaded if there are too many."""
        self.in_flight += 1
        try:
            if self.in_flight > self.max_in_flight:
                raise Overloaded(f"{self.max_in_flight} calls are in flight; try again in a moment")
            size = declared_length(scope["headers"])
            with self.quotas.call_of(caller.quota_name or ref.trajectory_uid, size) as use:
                yield use
        finally:
            self.in_flight -= 1

    async def _placed(
        self, ref: TrajectoryRef, opener: Caller | None, headers: CallHeaders, dialect: Dialect, raw: bytes
    ) -> tuple[CallPlace, ModelCall]:
        """An agent's call, and the trajectory to which it belongs."""
        if opener is not None and (opener.session is not None or headers.session is None):
            channel = session_key_of(opener).channel or TRAIN
            call = dialect.read(raw, self.surroundings(channel, is_rollout=False))
            placed = await self.placement.by_key(opener, headers, call)
        else:
            finding = self.placement.by_header(opener, headers) if opener else self.placement.by_url(ref, headers)
            placed = await finding
            call = dialect.read(raw, self.surroundings(placed.channel, is_rollout=placed.is_rollout))
        if placed.unrecorded is None:
            return placed, await self.stored.complete(call, placed.ref)
        return placed, as_uncaptured(call)

    def surroundings(self, channel: str, *, is_rollout: bool) -> CallSurroundings:
        trained = self._trained_model
        key = channel, is_rollout, trained
        known = self._surroundings.get(key)
        if known is None:
            known = self._surroundings[key] = replace(
                self.around,
                sampling=policy_for(self.sampling, channel, is_rollout=is_rollout),
                models=(trained, *self.other_models) if trained else (),
            )
        return known

    @property
    def _trained_model(self) -> str:
        return self.steps.trained_model or self.engines.model

    def _begin(self, call: ModelCall, placed: CallPlace, headers: CallHeaders, raw: bytes) -> BegunStep:
        by_text = placed.channel not in self.marked_side_calls
        side = side_call_kind(call.texts, call.request["max_tokens"], headers.kind, by_text=by_text)
        extras: dict[str, Json] = {}
        if call.malformed_history:
            extras[MALFORMED_HISTORY] = call.malformed_history
        if writes_markers(call, raw):
            extras[MARKERS_IN_TEXT] = True
        return BegunStep(
            trajectory_uid=placed.ref.trajectory_uid,
            prompt_uid=placed.ref.prompt_uid,
            uid=call.uid,
            policy_version=self.pool.policy_version,
            started_at=time.time(),
            sampling=call.sampling,
            temperature=call.request["temperature"],
            untrainable=f"{SIDE_CALL}: {side}" if side else None,
            extras=extras,
        )

    async def _join_or_lead(self, exchange: Exchange, client: Client, key: Hashable, caller: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        sighting, shared = exchange.sighting, self.deduplicator.find(key)
        try:
            if not exchange.is_recorded or (shared is not None and not exchange.headers.may_join):
                await self._while_wanted(exchange, client, self._answer(exchange), task.cancel)
            elif shared is not None:
                sighting = shared.sighting or sighting
                self.metrics.calls_joined[exchange.kind].inc()
                shared.listeners += 1
                try:
                    await self._while_wanted(exchange, client, exchange.writer.follow(shared), task.cancel)
                finally:
                    shared.leave()
            else:
                shared = self.deduplicator.lead(key, task.cancel, caller)
                shared.sighting = sighting
                exchange.writer.share(shared)
                try:
                    await self._while_wanted(exchange, client, self._answer(exchange), shared.leave)
                finally:
                    keep = sighting.is_whole and exchange.headers.idempotency_key is not None
                    self.deduplicator.end(key, shared, keep=keep)
        finally:
            await self._note_sighting(exchange, sighting)

    async def _note_sighting(self, exchange: Exchange, sighting: Sighting) -> None:
        """The answer to one client has ended. If it was not whole, or its client had gone, this client has not read
        it."""
        if sighting.uids and not sighting.is_read:
            writer = exchange.writer
            was_sent = writer.is_sent and sighting.is_whole and not exchange.is_abandoned
            is_read = exchange.has_shown_end or (was_sent and await is_handed_over(writer.handover))
            sighting.note(is_read=is_read)

    def _mark_choices(self, ref: TrajectoryRef, continued: Sequence[Turn]) -> None:
        """Of the choices of an earlier answer this call continues one; if several are the same, the first."""
        passed: set[str] = set()
        for turn in continued:
            if turn.others and turn.uid not in passed:
                passed.update(turn.others)
                self._mark(ref, turn.others, NOT_CONTINUED)
                self._mark(ref, [turn.uid], CONTINUED)

    def _mark(self, ref: TrajectoryRef, uids: Sequence[str], mark: str) -> None:
        self.steps.outbox.marks.add(ref, uids, mark)

    async def _while_wanted(
        self, exchange: Exchange, client: Client, answering: Coroutine[Any, Any, None], leave: Callable[[], object]
    ) -> None:
        """Answer. If the client leaves before the end, `leave` is called; it may cancel the answering."""

        def note_gone() -> None:
            if not exchange.is_over:
                exchange.is_abandoned = True
                leave()

        unwatch = watch_client(client, note_gone)
        try:
            await answering
        except asyncio.CancelledError:
            if not exchange.is_abandoned:
                raise
            self.metrics.clients_gone[exchange.kind].inc()
        except Exception as failure:  # noqa: BLE001 - those who joined the call get the answer too
            await exchange.fail(describe_unforeseen(failure, f"a call of trajectory {exchange.begun.trajectory_uid}"))
        finally:
            unwatch()

    async def _answer(self, exchange: Exchange) -> None:
        call, writer = exchange.call, exchange.writer
        if call.stream:
            writer.media_type = exchange.stream.media_type
            self.keep_alives.add(writer, exchange.stream.keep_alive)
        reply = None
        if exchange.is_recorded:
            self.book.begin(exchange.announcement())
        try:
            reply = await self._send(exchange)
            exchange.engine = reply.engine.address
            if reply.status == 404 and call.policy is not None:
                raise EngineUnavailable(
                    f"the engine {reply.engine.address} does not have the adapter {call.policy.adapter} yet; ask again"
                )
            if reply.status != 200:
                await self._refuse(exchange, describe_refusal(reply.status, await reply.read()))
            elif call.stream:
                await self._stream(exchange, reply)
            else:
                await self._whole(exchange, reply)
        finally:
            if call.stream:
                self.keep_alives.discard(writer)
            if reply is not None:
                reply.close()
            self.book.answered(exchange.begun.uid)
            if exchange.plan is not None:
                self.metrics.bridge[exchange.plan.outcome,] += 1

    async def _send(self, exchange: Exchange) -> EngineReply:
        """As exact ids if the call continues a recorded step. If the engine refuses them, it renders the messages."""
        call, step = exchange.call, exchange.begun
        if self.bridge is not None and exchange.is_recorded:
            ref = TrajectoryRef(step.trajectory_uid, step.prompt_uid)
            exchange.plan = plan = await self.bridge.plan(call, ref)
            if plan is not None:
                self._mark_choices(ref, plan.continued)
            if plan is not None and plan.ids is not None:
                ids, template = plan.ids.tolist(), plan.template
                reply = await self.engines.send_exact(call.request, ids, template, sticky=exchange.placed.sticky)
                if reply.engine.facts.template != template:
                    plan.give_up(BridgeOutcome.OTHER_ENGINE)
                if plan.ids is None or not 400 <= reply.status < 500:
                    return reply
                reply.close()
                plan.give_up(BridgeOutcome.REFUSED)
        return await self.engines.send(call.upstream, call.request, sticky=exchange.placed.sticky)

    def _origin(
        self, exchange: Exchange, choices: Sequence[Sampled], messages: Callable[[], Sequence[Mapping[str, Any] | None]]
    ) -> PromptOrigin:
        """`messages` are the replies as the agent gets them."""
        plan = exchange.plan
        if plan is None or self.bridge is None or not choices:
            return NO_ORIGIN
        plan.check_echo(choices[0].prompt_ids)
        return PromptOrigin(plan.prompt_made, self.bridge.lineages(plan, messages()) if plan.can_be_continued else [])

    async def _whole(self, exchange: Exchange, reply: EngineReply) -> None:
        call = exchange.call
        answer = read_reply(await reply.read(), reply.engine.kind, keep_ids=call.wants.ids)
        if answer.is_aborted:
            self.metrics.calls_continued[exchange.kind].inc()
            answer = await self.continuation.whole(call, answer, await reply.version())
        steps = await self._keep(exchange, reply, answer, answer.choices, answer.usage)
        if exchange.is_whitebox:
            add_origins(call, answer, await self.steps.confirm(steps, reply.engine))
        body = call.dialect.reply(call, answer)
        await self.book.announced(exchange.begun.uid)
        exchange.is_over = exchange.sighting.is_whole = True
        await exchange.writer.whole(200, body)

    async def _stream(self, exchange: Exchange, reply: EngineReply) -> None:
        call = exchange.call
        answer = ChoicesStream(reply.engine.kind, keep_ids=call.wants.ids)
        try:
            await _pass_on(answer, reply, exchange)
            if not answer.is_whole:
                raise EngineUnavailable(f"the engine {reply.engine.address} broke off in mid-answer")
            choices, usage, rest = answer.sampled(), answer.usage, b""
            if answer.error is not None:
                rest = exchange.stream.fail(call.dialect.error(describe_stream_error(answer.error)))
            elif answer.is_aborted:
                self.metrics.calls_continued[exchange.kind].inc()
                chunks, choices = await self.continuation.stream(call, answer, await reply.version())
                answer.note_rest(chunks)
                rest, usage = b"".join(map(exchange.stream.chunk, chunks)), NO_USAGE
        except (asyncio.CancelledError, EngineUnavailable):
            by_agent = exchange.is_abandoned and answer.error is None
            await self._record_cut_short(exchange, reply, answer.sampled(), by_agent=by_agent)
            raise
        if answer.error is not None:
            await self._record_cut_short(exchange, reply, choices, by_agent=False)
        else:
            steps = await self._keep(exchange, reply, answer, choices, usage)
            if exchange.is_whitebox:
                require_consistent(steps)
            rest += exchange.stream.finish(usage)
        exchange.sighting.is_whole = answer.error is None
        await self.book.announced(exchange.begun.uid)
        exchange.is_over = True
        await exchange.writer.end(rest)
        await _read_to_end(reply)

    async def _keep(
        self,
        exchange: Exchange,
        reply: EngineReply,
        answer: ChoicesReply | ChoicesStream,
        choices: Sequence[Sampled],
        usage: Usage,
    ) -> Sequence[Step]:
        """The steps of a whole answer, which are recorded even if its client leaves now."""
        building = self._build(exchange, reply, answer, choices, usage)
        is_quick = self.steps.redactor is None and reply.engine.facts.token_ids
        return await (building if is_quick else run_to_end(building))

    async def _build(
        self,
        exchange: Exchange,
        reply: EngineReply,
        answer: ChoicesReply | ChoicesStream,
        choices: Sequence[Sampled],
        usage: Usage,
    ) -> Sequence[Step]:
        call = exchange.call
        origin = self._origin(exchange, choices, answer.messages)
        steps = await self.steps.build(exchange.begun, call, reply, choices, usage, answer.texts, origin)
        exchange.count(steps)
        if exchange.is_recorded:
            self._note_turn(exchange, answer.messages)
            await self._record(exchange, store_turn(call, steps, answer.messages), reply)
        return steps

    async def _record(self, exchange: Exchange, steps: Sequence[Step], reply: EngineReply) -> None:
        """The conversation goes on with the tokens that were sampled; only what is stored is redacted."""
        if exchange.plan is not None and self.bridge is not None:
            self.bridge.note(exchange.plan, steps)
        if self.steps.redactor is not None:
            steps = self.stored.keep_masked(steps, await self.steps.redact(steps))
        if not steps:
            return
        exchange.sighting.uids = [step.uid for step in steps]
        self.left_out.note(exchange.placed.channel, [step.untrainable for step in steps])
        await self.steps.record(steps, reply.engine)

    def _note_turn(self, exchange: Exchange, messages: Callable[[], Sequence[Mapping[str, Any] | None]]) -> None:
        """So that a later call with the same session key can continue it."""
        if (conversation := exchange.placed.conversation) is not None:
            self.placement.conversations.note(conversation, exchange.begun.uid, messages)

    async def _record_cut_short(
        self, exchange: Exchange, reply: EngineReply, choices: Sequence[Sampled], *, by_agent: bool
    ) -> None:
        """No call continues such a step."""
        if not exchange.is_recorded:
            return
        origin = self._origin(exchange, choices, lambda: ())
        begun, call = exchange.begun, exchange.call
        recording = self.steps.record_cut_short(begun, call, reply, choices, by_agent=by_agent, origin=origin)
        await (recording if self.steps.redactor is None else run_to_end(recording))

    async def _refuse(self, exchange: Exchange, error: ErrorDetails) -> None:
        """Pass an engine's refusal on. A prompt longer than the model's context ends the episode: the pool is told."""
        if error.code == CONTEXT_OVERFLOW and exchange.is_recorded:
            step, why = exchange.begun, {ENDED_BY: CONTEXT_OVERFLOW}
            with contextlib.suppress(StepwellError):
                await self.pool.register_trajectory(
                    Registration(step.trajectory_uid, step.prompt_uid, metadata=why, opens=False)
                )
        await exchange.fail(error)

    def _count(self, kind: str, writer: ResponseWriter, began: float, exchange: Exchange | None) -> None:
        took, first = time.monotonic() - began, writer.first_byte_at
        prompt, response = (exchange.prompt_tokens, exchange.response_tokens) if exchange else (0, 0)
        first_byte = None if first is None else first - began
        self.metrics.call_done(kind, writer.status, took, first_byte, prompt, response)
        if self.tracing is not None and exchange is not None:
            self.tracing.record(kind, exchange.begun.started_at, exchange.headers.traceparent, exchange.attributes())


async def _pass_on(answer: ChoicesStream, reply: EngineReply, exchange: Exchange) -> None:
    """Pass events on until the engine sends [DONE] or closes the stream."""
    events, write_chunk, write = EventReader(), exchange.stream.chunk, exchange.writer.write
    while not answer.done:
        data = await reply.next_bytes()
        out = []
        for payload in events.feed(data) if data else events.end():
            chunk = answer.read(payload)
            if chunk is not None:
                out.append(write_chunk(chunk))
        if joined := b"".join(out):
            shows_end = answer.is_whole and not answer.is_aborted and exchange.writer.is_open()
            await write(joined)
            exchange.has_shown_end |= shows_end
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
