"""Calls that count the tokens of a prompt: an engine renders it. Nothing is generated and nothing is recorded.

They have the request rules and the quotas of other calls: an engine fetches the images of such a prompt too.
"""

import time
from dataclasses import dataclass

from stepwell.access.caller import Caller
from stepwell.engines.replies import RefusedReply
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.call_in_flight import RequestedCall, send_error
from stepwell.gateway.dialects.dialect import TokenCounter
from stepwell.gateway.http.error_responses import describe_refusal, describe_unforeseen
from stepwell.gateway.http.request_body import Message, Receive, Send
from stepwell.gateway.http.response_writer import ResponseWriter
from stepwell.gateway.unrecorded_calls import NO_TRAJECTORY
from stepwell.pool.api.producing import TRAIN
from stepwell.pool.api.sessions import session_id_of
from stepwell.wire.openai import Upstream


@dataclass(frozen=True, slots=True)
class TokenCounts:
    calls: AgentCalls
    """The calls whose prompts are counted."""

    async def serve(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        requested: RequestedCall,
        counter: TokenCounter,
        caller: Caller,
    ) -> None:
        ref, dialect = requested.ref, requested.dialect
        writer = ResponseWriter(send, time.monotonic)
        began = writer.touched_at
        try:
            with self.calls.admit(scope, ref, caller) as use:
                counted = await self._count(await use.body(receive), requested, counter)
            if isinstance(counted, RefusedReply):
                await send_error(writer, dialect, describe_refusal(counted.status, counted.body))
            else:
                await writer.whole(200, counter.reply(counted))
        except Exception as failure:  # noqa: BLE001 - whatever it is, the agent gets an answer in its dialect
            what = f"a count of tokens of trajectory {ref.trajectory_uid}"
            await send_error(writer, dialect, describe_unforeseen(failure, what))
        finally:
            kind = f"{dialect.name}_count"
            self.calls.metrics.call_done(kind, writer.status, time.monotonic() - began, None, 0, 0)

    async def _count(self, raw: bytes, requested: RequestedCall, counter: TokenCounter) -> int | RefusedReply:
        calls, ref = self.calls, requested.ref
        if ref == NO_TRAJECTORY:
            around = calls.contexts.without_channel(requested.url)
        else:
            is_session = bool(session_id_of(ref.prompt_uid))  # a count opens no trajectory
            channel = TRAIN if is_session else await calls.resolver.channel_of(ref)
            around = calls.contexts.context_of(channel, requested.url, is_rollout=not is_session)
        request = counter.read(raw, around)
        calls.removed.note(around.rules.apply(request, Upstream.CHAT))
        return await calls.engines.count_tokens(request)
