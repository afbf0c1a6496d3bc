"""One call of an agent, from its first byte to its last: read by its dialect, placed, joined with its repetitions,
answered, counted.

Every token takes this path, so it is plain ASGI without a framework. engine_answers.py passes an engine's answer on and
records it. If a client leaves, its engine is freed, unless another client waits for the same answer.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from stepwell.access.caller import Caller
from stepwell.common.bounded_http import WHEN_GONE
from stepwell.engines.engine import DEFAULT_MODEL
from stepwell.engines.fleet import EngineDirectory
from stepwell.engines.replica import RefusedReply
from stepwell.errors import EngineUnavailable, Overloaded
from stepwell.gateway.call_resolver import CallResolver, session_key_of
from stepwell.gateway.calls import (
    NO_TRAJECTORY,
    UNRECORDED_HEADER,
    CallInFlight,
    CallPlace,
    RequestedCall,
    Unrecorded,
    as_uncaptured,
    as_unrecorded,
    send_error,
)
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall, TokenCounter
from stepwell.gateway.dialects.request_rules import SamplingPolicy, policy_for, told_sampling
from stepwell.gateway.dialects.side_calls import side_call_kind, writes_markers
from stepwell.gateway.engine_answers import EngineAnswers
from stepwell.gateway.error_responses import describe_refusal, describe_unforeseen
from stepwell.gateway.metrics import GatewayMetrics, RemovedFields, ReplacedSampling, Tracing
from stepwell.gateway.recording.step_builder import PendingStep
from stepwell.gateway.requests import (
    CAPTURE_HEADER,
    CallHeaders,
    CallQuotas,
    CallUrl,
    Headers,
    Message,
    QuotaUse,
    Receive,
    Send,
    declared_length,
    read_call_headers,
)
from stepwell.gateway.response_writer import RequestDeduplicator, ResponseWriter, Sighting, handover_of, is_handed_over
from stepwell.pool.api.policy import ChannelPolicy
from stepwell.pool.api.producing import TRAIN, Repeats, TrajectoryRef
from stepwell.pool.api.sessions import session_id_of
from stepwell.steps.conversation import MARKERS_IN_TEXT
from stepwell.steps.step import Json
from stepwell.steps.trainable import SIDE_CALL
from stepwell.wire.openai import Upstream

MAX_IN_FLIGHT = 20_000
TRAJECTORY_HEADER = b"x-stepwell-trajectory"
"""The header in the answer to a call whose URL names no trajectory: `trajectory_uid/prompt_uid`, for its feedback."""
SAMPLING_HEADER = b"x-stepwell-sampling"
"""The header in an answer that was sampled otherwise than its call asks: what is in force, and what was asked for."""
WHITEBOX = CallPlace(NO_TRAJECTORY, "", "", Unrecorded.URL)
MALFORMED_HISTORY = "malformed_history"
"""The number, in a step's extras, of tool calls in its history whose arguments are not a JSON object."""


class Client(NamedTuple):
    """The client that waits for an answer, once the request is read."""

    scope: Message
    receive: Receive


@dataclass(slots=True, kw_only=True)
class DialectContexts:
    """The contexts, by channel, that dialects may use beside the requests."""

    around: DialectContext
    """The part that is the same for all."""
    sampling: Mapping[str, SamplingPolicy]
    """The policies by channel; what `policy_for` makes of one counts."""
    trained_model: Callable[[], str]
    """The model whose calls are recorded; empty while it is not known."""
    other_models: Sequence[str]
    """The models that agents may name beside the trained one."""
    _known: dict[tuple[str, bool, str, str], DialectContext] = field(default_factory=dict)
    """The contexts by channel, whether the call is a rollout's, trained model, and path template."""

    def context_of(self, channel: str, url: CallUrl, *, is_rollout: bool) -> DialectContext:
        trained = self.trained_model()
        key = channel, is_rollout, trained, url.path
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = replace(
                self.around,
                sampling=policy_for(self.sampling, channel, is_rollout=is_rollout),
                models=(trained, *self.other_models) if trained else (),
                url=CallUrl(url.path, url.path),
            )
        return known if url.is_plain else replace(known, url=url)

    def without_channel(self, url: CallUrl) -> DialectContext:
        """The context of a call that belongs to no channel."""
        return replace(self.around, url=url)


class ChannelRouting:
    """Which adapter answers the calls of a channel, and whether they are held.

    - A channel with an adapter of its own is answered by it. An adapter's name stands for the same weights for ever, so
      the version of every token is certain, whatever happens during the call.
    - An agent names the trained model; it cannot name an adapter, so it cannot reach that of another channel.
    - While a channel is paused, its new calls wait. Those of other channels do not.
    - If the pool cannot be asked for a call's channel, the engines' own weights answer, and the step says so.
    """

    def __init__(self, directory: EngineDirectory, hold: float) -> None:
        """`hold`: seconds for which a call waits while its channel is paused."""
        self._directory = directory
        self._hold = hold

    async def route(self, call: ModelCall, channel: str, trained_model: str) -> ModelCall:
        """The call to the channel's adapter, as soon as the channel is not paused."""
        policy = await self._policy(channel)
        if not policy.adapter or call.request.get("model") not in (None, DEFAULT_MODEL, trained_model):
            return call
        return call._replace(request={**call.request, "model": policy.adapter}, policy=policy)

    async def _policy(self, channel: str) -> ChannelPolicy:
        serving = self._directory.serving
        if serving is None or not serving.channels:
            return ChannelPolicy(channel)
        try:
            async with asyncio.timeout(self._hold):
                while (policy := serving.channel(channel)).paused:
                    serving = await self._directory.serving_after(serving)
        except TimeoutError:
            raise EngineUnavailable(f"channel {channel!r} has been paused for {self._hold:g} s") from None
        return policy


@dataclass(slots=True, kw_only=True)
class AgentCalls:
    """Calls in any dialect: of agents, which have a base_url, and unrecorded ones."""

    resolver: CallResolver
    contexts: DialectContexts
    channels: ChannelRouting
    answers: EngineAnswers
    metrics: GatewayMetrics
    tracing: Tracing | None
    marked_side_calls: Collection[str]
    """Channels in which a side call is one by its header only, not by its text."""
    max_in_flight: int = MAX_IN_FLIGHT
    in_flight: int = 0
    quotas: CallQuotas = field(default_factory=CallQuotas)
    removed: RemovedFields = field(init=False)
    replaced: ReplacedSampling = field(init=False)
    deduplicator: RequestDeduplicator = field(default_factory=lambda: RequestDeduplicator(time.monotonic))

    def __post_init__(self) -> None:
        self.removed = RemovedFields(self.metrics)
        self.replaced = ReplacedSampling(self.metrics)

    async def serve(
        self, scope: Message, receive: Receive, send: Send, requested: RequestedCall, caller: Caller
    ) -> None:
        """A call of NO_TRAJECTORY belongs to a session of the caller, or to the trajectory that its header names. If it
        is a white-box one, it is not recorded on purpose."""
        writer = ResponseWriter(send, time.monotonic)
        writer.handover = handover_of(scope)
        dialect, ref = requested.dialect, requested.ref
        kind = f"whitebox_{dialect.name}" if requested.is_whitebox else dialect.name
        began = writer.touched_at
        flight = None
        try:
            headers = self._read_headers(scope, caller, writer)
            with self._admit(scope, ref, caller) as use:
                raw = await use.body(receive)
                placed, call = await self._placed(requested, caller, headers, raw)
                ref = placed.ref
                self._tell(placed, call, writer)
                flight = CallInFlight(
                    kind,
                    placed,
                    call,
                    self._begin(call, placed, headers, raw),
                    writer,
                    headers,
                    dialect.stream(call),
                    Sighting(partial(self._mark, placed.ref)),
                    headers.shared_key(raw, requested.url.sent),
                    requested.is_whitebox,
                )
                if requested.names_no_trajectory and (shown := placed.shown) is not None:
                    writer.headers.append((TRAJECTORY_HEADER, f"{shown.trajectory_uid}/{shown.prompt_uid}".encode()))
                with self.resolver.call_of(ref):
                    name = caller.quota_name or ref.trajectory_uid
                    key = headers.key(ref, raw, requested.url.text)
                    await self._join_or_lead(flight, Client(scope, receive), key, name)
                use.use(flight.prompt_tokens + flight.response_tokens)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the agent gets an answer in its dialect
            error = describe_unforeseen(failure, f"a call of trajectory {ref.trajectory_uid}")
            self.metrics.calls_refused[kind, error.code].inc()
            await send_error(writer, dialect, error, flight.stream if flight else None)
        finally:
            self._count(kind, writer, began, flight)

    async def count_tokens(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        requested: RequestedCall,
        counter: TokenCounter,
        caller: Caller,
    ) -> None:
        """Count the tokens of a prompt: an engine renders it. Nothing is generated and nothing is recorded. The request
        rules and the quotas of other calls hold: an engine fetches the images of such a prompt too."""
        ref, dialect = requested.ref, requested.dialect
        writer = ResponseWriter(send, time.monotonic)
        began = writer.touched_at
        try:
            with self._admit(scope, ref, caller) as use:
                request = await self._prompt_to_count(await use.body(receive), requested, counter)
                counted = await self.answers.engines.count_tokens(request)
            if isinstance(counted, RefusedReply):
                await send_error(writer, dialect, describe_refusal(counted.status, counted.body))
            else:
                await writer.whole(200, counter.reply(counted))
        except Exception as failure:  # noqa: BLE001 - whatever it is, the agent gets an answer in its dialect
            what = f"a count of tokens of trajectory {ref.trajectory_uid}"
            await send_error(writer, dialect, describe_unforeseen(failure, what))
        finally:
            self.metrics.call_done(f"{dialect.name}_count", writer.status, time.monotonic() - began, None, 0, 0)

    async def _prompt_to_count(self, raw: bytes, requested: RequestedCall, counter: TokenCounter) -> dict[str, Any]:
        ref, url = requested.ref, requested.url
        if ref == NO_TRAJECTORY:
            around = self.contexts.without_channel(url)
        else:
            is_session = bool(session_id_of(ref.prompt_uid))  # a count opens no trajectory
            channel = TRAIN if is_session else await self.resolver.channel_of(ref)
            around = self.contexts.context_of(channel, url, is_rollout=not is_session)
        request = counter.read(raw, around)
        self.removed.note(around.rules.apply(request, Upstream.CHAT))
        return request

    @contextlib.contextmanager
    def _admit(self, scope: Message, ref: TrajectoryRef, caller: Caller) -> Iterator[QuotaUse]:
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

    def _read_headers(self, scope: Message, caller: Caller, writer: ResponseWriter) -> CallHeaders:
        found: Headers = scope["headers"]
        headers = read_call_headers(found)
        if headers.is_captured or caller.may_opt_out:
            return headers
        self.metrics.opt_outs_ignored.inc()
        writer.headers.append((CAPTURE_HEADER, b"on"))
        return replace(headers, is_captured=True)

    async def _placed(
        self, requested: RequestedCall, caller: Caller, headers: CallHeaders, raw: bytes
    ) -> tuple[CallPlace, ModelCall]:
        """The call, and the trajectory to which it belongs."""
        read, url, contexts = requested.dialect.read, requested.url, self.contexts
        if requested.is_whitebox:
            return WHITEBOX, as_unrecorded(read(raw, contexts.without_channel(url)))
        if requested.names_no_trajectory and (caller.session is not None or headers.session is None):
            channel = session_key_of(caller).channel or TRAIN
            call = read(raw, contexts.context_of(channel, url, is_rollout=False))
            placed = await self.resolver.by_key(caller, headers, call)
        else:
            if requested.names_no_trajectory:
                placed = await self.resolver.by_header(caller, headers)
            else:
                placed = await self.resolver.by_url(requested.ref, headers)
            call = read(raw, contexts.context_of(placed.channel, url, is_rollout=placed.is_rollout))
        if placed.unrecorded is None:
            call = await self.answers.stored.complete(call, placed.ref)
        else:
            call = as_uncaptured(call)
        return placed, await self.channels.route(call, placed.channel, contexts.trained_model())

    def _tell(self, placed: CallPlace, call: ModelCall, writer: ResponseWriter) -> None:
        """Tells in the answer's headers and the metrics how the call is treated."""
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

    def _begin(self, call: ModelCall, placed: CallPlace, headers: CallHeaders, raw: bytes) -> PendingStep:
        by_text = placed.channel not in self.marked_side_calls
        side = side_call_kind(call.texts, call.request["max_tokens"], headers.kind, by_text=by_text)
        extras: dict[str, Json] = {}
        if call.malformed_history:
            extras[MALFORMED_HISTORY] = call.malformed_history
        if writes_markers(call, raw):
            extras[MARKERS_IN_TEXT] = True
        return PendingStep(
            trajectory_uid=placed.ref.trajectory_uid,
            prompt_uid=placed.ref.prompt_uid,
            uid=call.uid,
            policy_version=self.answers.pool.policy_version,
            started_at=time.time(),
            sampling=call.sampling,
            temperature=call.request["temperature"],
            untrainable=f"{SIDE_CALL}: {side}" if side else None,
            extras=extras,
        )

    def _mark(self, ref: TrajectoryRef, uids: Sequence[str], mark: str) -> None:
        self.answers.steps.outbox.marks.add(ref, uids, mark)

    async def _join_or_lead(self, flight: CallInFlight, client: Client, key: Hashable, caller: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        sighting, shared = flight.sighting, self.deduplicator.find(key)
        try:
            if not flight.is_recorded or (shared is not None and not flight.headers.may_join):
                await self._while_wanted(flight, client, self.answers.answer(flight), task.cancel)
            elif shared is not None:
                sighting = shared.sighting or sighting
                self.metrics.calls_joined[flight.kind].inc()
                shared.listeners += 1
                try:
                    if flight.headers.repeats is Repeats.ALL:
                        await self.answers.book.given_again(flight.announcement(shared.uid))
                    await self._while_wanted(flight, client, flight.writer.follow(shared), task.cancel)
                finally:
                    shared.leave()
            else:
                shared = self.deduplicator.lead(key, task.cancel, caller)
                shared.sighting, shared.uid = sighting, flight.pending.uid
                flight.writer.share(shared)
                try:
                    await self._while_wanted(flight, client, self.answers.answer(flight), shared.leave)
                finally:
                    keep = sighting.is_whole and flight.headers.idempotency_key is not None
                    self.deduplicator.end(key, shared, keep=keep)
        finally:
            await self._note_sighting(flight, sighting)

    async def _note_sighting(self, flight: CallInFlight, sighting: Sighting) -> None:
        """The answer to one client has ended. If it was not whole, or its client had gone, this client has not read
        it."""
        if sighting.uids and not sighting.is_read:
            writer = flight.writer
            was_sent = writer.is_sent and sighting.is_whole and not flight.is_abandoned
            sighting.note(is_read=was_sent and await is_handed_over(writer.handover))

    async def _while_wanted(
        self, flight: CallInFlight, client: Client, answering: Coroutine[Any, Any, None], leave: Callable[[], object]
    ) -> None:
        """Answer. If the client leaves before the end, `leave` is called; it may cancel the answering."""

        def note_gone() -> None:
            if not flight.is_over:
                flight.is_abandoned = True
                leave()

        unwatch = watch_client(client, note_gone)
        try:
            await answering
        except asyncio.CancelledError:
            if not flight.is_abandoned:
                raise
            self.metrics.clients_gone[flight.kind].inc()
        except Exception as failure:  # noqa: BLE001 - those who joined the call get the answer too
            await flight.fail(describe_unforeseen(failure, f"a call of trajectory {flight.pending.trajectory_uid}"))
        finally:
            unwatch()

    def _count(self, kind: str, writer: ResponseWriter, began: float, flight: CallInFlight | None) -> None:
        took, first = time.monotonic() - began, writer.first_byte_at
        prompt, response = (flight.prompt_tokens, flight.response_tokens) if flight else (0, 0)
        first_byte = None if first is None else first - began
        self.metrics.call_done(kind, writer.status, took, first_byte, prompt, response)
        if self.tracing is not None and flight is not None:
            self.tracing.record(kind, flight.pending.started_at, flight.headers.traceparent, flight.attributes())


def watch_client(client: Client, on_gone: Callable[[], object]) -> Callable[[], object]:
    """Call `on_gone` if the client leaves. The function that is returned ends the watching.

    The gateway's own HTTP connections tell it. Under another server, a task waits for it, which costs each call more.
    """
    when_gone = (client.scope.get("extensions") or {}).get(WHEN_GONE)
    if when_gone is None:
        return asyncio.create_task(_wait_for_leaving(client.receive, on_gone)).cancel
    end_watching: Callable[[], object] = when_gone(on_gone)
    return end_watching


async def _wait_for_leaving(receive: Receive, on_gone: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
