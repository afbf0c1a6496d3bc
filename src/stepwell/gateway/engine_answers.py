"""The answer to one call: an engine is asked, what it says is passed on, and becomes steps.

- An answer is passed on as it arrives. Its step is in the outbox before the agent sees the end of the answer.
- An answer that an engine broke off for a weight update is carried on from its tokens.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stepwell.common.async_calls import run_to_end
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReply
from stepwell.errors import EngineUnavailable, StepwellError
from stepwell.gateway.bridge.bridge import Bridge
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, Turn
from stepwell.gateway.call_resolver import CallResolver
from stepwell.gateway.calls import CallInFlight, add_origins, require_consistent
from stepwell.gateway.dialects.openai_choices import ChoicesReply, ChoicesStream, EventReader, read_reply
from stepwell.gateway.error_responses import (
    CONTEXT_OVERFLOW,
    ErrorDetails,
    describe_refusal,
    describe_stream_error,
)
from stepwell.gateway.metrics import GatewayMetrics
from stepwell.gateway.recording.call_book import CallBook
from stepwell.gateway.recording.step_builder import NO_ORIGIN, PromptOrigin, StepBuilder
from stepwell.gateway.response_writer import KeepAlives
from stepwell.gateway.stored_conversations import StoredConversations, store_turn
from stepwell.pool.api.producing import CONTINUED, ENDED_BY, Registration, TrajectoryRef
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step
from stepwell.steps.trainable import NOT_CONTINUED, LeftOutLog
from stepwell.wire.openai import NO_USAGE, Sampled, Usage

Replies: TypeAlias = Callable[[], Sequence[Mapping[str, Any] | None]]

CLOSE_TIMEOUT = 1.0
"""Seconds in which an engine must close a stream after [DONE]; otherwise its connection is not used again."""


@dataclass(slots=True, kw_only=True)
class EngineAnswers:
    pool: PoolClient
    engines: EngineFleet
    resolver: CallResolver
    steps: StepBuilder
    book: CallBook
    metrics: GatewayMetrics
    left_out: LeftOutLog
    keep_alives: KeepAlives
    bridge: Bridge | None = None
    """None: engines render every prompt."""
    continuation: Continuation = field(init=False)
    stored: StoredConversations = field(init=False)

    def __post_init__(self) -> None:
        self.continuation = Continuation(self.engines)
        self.stored = StoredConversations(self.pool, self.steps.outbox)

    def drop_turns(self, trajectory_uid: str) -> None:
        self.stored.drop(trajectory_uid)
        if self.bridge is not None:
            self.bridge.turns.drop(trajectory_uid)

    async def answer(self, flight: CallInFlight) -> None:
        call, writer = flight.call, flight.writer
        if call.stream:
            writer.media_type = flight.stream.media_type
            self.keep_alives.add(writer, flight.stream.keep_alive)
        reply = None
        if flight.is_recorded:
            self.book.begin(flight.announcement())
        try:
            reply = await self._send(flight)
            flight.engine = reply.engine.address
            if reply.status == 404 and call.policy is not None:
                raise EngineUnavailable(
                    f"the engine {reply.engine.address} does not have the adapter {call.policy.adapter} yet; ask again"
                )
            if reply.status != 200:
                await self._refuse(flight, describe_refusal(reply.status, await reply.read()))
            elif call.stream:
                await self._stream(flight, reply)
            else:
                await self._whole(flight, reply)
        finally:
            if call.stream:
                self.keep_alives.discard(writer)
            if reply is not None:
                reply.close()
            self.book.answered(flight.pending.uid)
            if flight.plan is not None:
                self.metrics.bridge[flight.plan.outcome,] += 1

    async def _send(self, flight: CallInFlight) -> EngineReply:
        """Ask an engine: with exact ids if the call continues a recorded step, with the messages if the engine refuses
        the ids."""
        call, step = flight.call, flight.pending
        if self.bridge is not None and flight.is_recorded:
            ref = TrajectoryRef(step.trajectory_uid, step.prompt_uid)
            flight.plan = plan = await self.bridge.plan(call, ref)
            if plan is not None:
                self._mark_choices(ref, plan.continued)
            if plan is not None and plan.ids is not None:
                ids, template = plan.ids.tolist(), plan.template
                reply = await self.engines.send_exact(call.request, ids, template, sticky=flight.placed.sticky)
                if reply.engine.facts.template != template:
                    plan.give_up(BridgeOutcome.OTHER_ENGINE)
                if plan.ids is None or not 400 <= reply.status < 500:
                    return reply
                reply.close()
                plan.give_up(BridgeOutcome.REFUSED)
        return await self.engines.send(call.upstream, call.request, sticky=flight.placed.sticky)

    def _mark_choices(self, ref: TrajectoryRef, continued: Sequence[Turn]) -> None:
        """Marks the step that this call continues as one of the choices of an earlier answer; if several are the same,
        the first."""
        passed: set[str] = set()
        for turn in continued:
            if turn.others and turn.uid not in passed:
                passed.update(turn.others)
                self.steps.outbox.marks.add(ref, turn.others, NOT_CONTINUED)
                self.steps.outbox.marks.add(ref, [turn.uid], CONTINUED)

    async def _whole(self, flight: CallInFlight, reply: EngineReply) -> None:
        call = flight.call
        answer = read_reply(await reply.read(), reply.engine.kind, keep_ids=call.wants.ids)
        if answer.is_aborted:
            self.metrics.calls_continued[flight.kind].inc()
            answer = await self.continuation.whole(call, answer, await reply.version())
        steps = await self._keep(flight, reply, answer, answer.choices, answer.usage)
        if flight.is_whitebox:
            add_origins(call, answer, await self.steps.confirm(steps, reply.engine))
        body = call.dialect.reply(call, answer)
        await self.book.announced(flight.pending.uid)
        flight.is_over = flight.sighting.is_whole = True
        await flight.writer.whole(200, body)

    async def _stream(self, flight: CallInFlight, reply: EngineReply) -> None:
        call = flight.call
        answer = ChoicesStream(reply.engine.kind, keep_ids=call.wants.ids)
        try:
            end = await _pass_on(answer, reply, flight)
            if not answer.is_whole:
                raise EngineUnavailable(f"the engine {reply.engine.address} broke off in mid-answer")
            choices, usage, rest = answer.sampled(), answer.usage, end
            if answer.error is not None:
                rest += flight.stream.fail(call.dialect.error(describe_stream_error(answer.error)))
            elif answer.is_aborted:
                self.metrics.calls_continued[flight.kind].inc()
                chunks, choices = await self.continuation.stream(call, answer, await reply.version())
                answer.note_rest(chunks)
                rest, usage = end + b"".join(map(flight.stream.chunk, chunks)), NO_USAGE
        except (asyncio.CancelledError, EngineUnavailable):
            by_agent = flight.is_abandoned and answer.error is None
            await self._record_cut_short(flight, reply, answer.sampled(), by_agent=by_agent)
            raise
        if answer.error is not None:
            await self._record_cut_short(flight, reply, choices, by_agent=False)
        else:
            steps = await self._keep(flight, reply, answer, choices, usage)
            if flight.is_whitebox:
                require_consistent(steps)
            rest += flight.stream.finish(usage)
        flight.sighting.is_whole = answer.error is None
        await self.book.announced(flight.pending.uid)
        flight.is_over = True
        await flight.writer.end(rest)
        await _read_to_end(reply)

    async def _keep(
        self,
        flight: CallInFlight,
        reply: EngineReply,
        answer: ChoicesReply | ChoicesStream,
        choices: Sequence[Sampled],
        usage: Usage,
    ) -> Sequence[Step]:
        """The steps of a whole answer, which are recorded even if its client leaves now."""
        building = self._build(flight, reply, answer, choices, usage)
        is_quick = self.steps.redactor is None and reply.engine.facts.token_ids
        return await (building if is_quick else run_to_end(building))

    async def _build(
        self,
        flight: CallInFlight,
        reply: EngineReply,
        answer: ChoicesReply | ChoicesStream,
        choices: Sequence[Sampled],
        usage: Usage,
    ) -> Sequence[Step]:
        call = flight.call
        origin = self._origin(flight, choices, answer.messages)
        steps = await self.steps.build(flight.pending, call, reply, choices, usage, answer.texts, origin)
        flight.count(steps)
        if flight.is_recorded:
            if (conversation := flight.placed.conversation) is not None:
                self.resolver.note_answer(conversation, flight.pending.uid, answer.messages)
            await self._record(flight, store_turn(call, steps, answer.messages), reply)
        return steps

    def _origin(self, flight: CallInFlight, choices: Sequence[Sampled], messages: Replies) -> PromptOrigin:
        """`messages` are the replies as the agent gets them."""
        plan = flight.plan
        if plan is None or self.bridge is None or not choices:
            return NO_ORIGIN
        plan.check_echo(choices[0].prompt_ids)
        return PromptOrigin(
            plan.prompt_made, self.bridge.conversation_digests(plan, messages()) if plan.can_be_continued else []
        )

    async def _record(self, flight: CallInFlight, steps: Sequence[Step], reply: EngineReply) -> None:
        """The conversation goes on with the tokens that were sampled; only what is stored is redacted."""
        if flight.plan is not None and self.bridge is not None:
            self.bridge.note(flight.plan, steps)
        if self.steps.redactor is not None:
            steps = self.stored.keep_masked(steps, await self.steps.redact(steps))
        if not steps:
            return
        flight.sighting.uids = [step.uid for step in steps]
        self.left_out.note(flight.placed.channel, [step.untrainable for step in steps])
        await self.steps.record(steps, reply.engine)

    async def _record_cut_short(
        self, flight: CallInFlight, reply: EngineReply, choices: Sequence[Sampled], *, by_agent: bool
    ) -> None:
        """No call continues such a step."""
        if not flight.is_recorded:
            return
        origin = self._origin(flight, choices, lambda: ())
        pending, call = flight.pending, flight.call
        recording = self.steps.record_cut_short(pending, call, reply, choices, by_agent=by_agent, origin=origin)
        await (recording if self.steps.redactor is None else run_to_end(recording))

    async def _refuse(self, flight: CallInFlight, error: ErrorDetails) -> None:
        """Pass an engine's refusal on. A prompt longer than the model's context ends the episode: the pool is told."""
        if error.code == CONTEXT_OVERFLOW and flight.is_recorded:
            step, why = flight.pending, {ENDED_BY: CONTEXT_OVERFLOW}
            with contextlib.suppress(StepwellError):
                await self.pool.register_trajectory(
                    Registration(step.trajectory_uid, step.prompt_uid, metadata=why, opens=False)
                )
        await flight.fail(error)


async def _pass_on(answer: ChoicesStream, reply: EngineReply, flight: CallInFlight) -> bytes:
    """Passes events on until the engine sends [DONE] or closes the stream. Returns the events from the finish_reason
    on, which are the end of the answer: some clients leave there."""
    events, write_chunk, write = EventReader(), flight.stream.chunk, flight.writer.write
    end: list[bytes] = []
    while not answer.done:
        data = await reply.next_bytes()
        out: list[bytes] = []
        for payload in events.feed(data) if data else events.end():
            chunk = answer.read(payload)
            if not answer.is_whole:  # also where another choice has only begun
                out += end
                end.clear()
            if chunk is not None:
                (end if answer.is_whole else out).append(write_chunk(chunk))
        if joined := b"".join(out):
            await write(joined)
        if not data:
            break
    return b"".join(end)


async def _read_to_end(reply: EngineReply) -> None:
    """Read a stream to its end after [DONE], so that its connection can be used again."""
    if reply.is_read:
        return
    with contextlib.suppress(TimeoutError, EngineUnavailable):
        async with asyncio.timeout(CLOSE_TIMEOUT):
            while await reply.next_bytes():
                pass
