"""Chat and completions for those who keep their tokens themselves, environments first. Nothing of it is recorded.

The calls stand at the gateway's root, where no trajectory is named, and go the way of an agent's: every sampling
parameter explicit, to an engine that is well, held while engines pause, carried on where one broke off. What always
holds: ids and log-probabilities that the engine gave add up, or the call fails; ids that were encoded again from text
are told as such, and a choice that cannot be encoded has none.
"""

import asyncio
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReplica
from stepwell.engines.replies import EngineReply
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.gateway.continuation import Continuation
from stepwell.gateway.dialects.dialect import Kind, ModelCall, read_call
from stepwell.gateway.dialects.openai_choices import ChoicesReply, read_reply
from stepwell.gateway.http.error_responses import JSON, relayed
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.recording.recorded import CallContext, build_steps
from stepwell.gateway.recording.step_builder import StepBuilder
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
from stepwell.gateway.routes.openapi import CHAT, COMPLETIONS
from stepwell.pool.api.ports import StepSink
from stepwell.steps.step import Exactness, Step
from stepwell.wire.openai import Sampled, write_object

NOT_ASKED = ("stream", "stream_options", "return_token_ids")
"""Fields of an agent's call that mean nothing here: the answer is whole, and has its ids."""
CLIENT_GONE = 499
"""The status of an answer that no one gets to see."""


def unrecorded_router(chat: "UnrecordedCalls") -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_asked(CHAT))
    async def chat_completions(request: Request) -> Response:
        """OpenAI's call, unrecorded, for those who keep their tokens themselves: the answer has all ids and
        log-probabilities, and with each choice its policy_version, version_spans and exactness."""
        return await _while_there(request, chat.answer(Kind.CHAT, await request.body()))

    @router.post("/v1/completions", openapi_extra=_asked(COMPLETIONS))
    async def completions(request: Request) -> Response:
        """The same for text and token ids."""
        return await _while_there(request, chat.answer(Kind.COMPLETIONS, await request.body()))

    return router


class UnrecordedCalls:
    def __init__(
        self,
        pool: StepSink,
        engines: EngineFleet,
        recording: StepBuilder,
        versions: VersionConfirmer,
        sight: GatewayMetrics,
        *,
        response_length: int,
    ) -> None:
        self._pool = pool
        self._engines = engines
        self._recording = recording
        self._versions = versions
        self._sight = sight
        self._response_length = response_length
        self._continuation = Continuation(engines)

    async def answer(self, kind: Kind, raw: bytes) -> Response:
        call = replace(read_call(kind, raw, response_length=self._response_length), wants_ids=True, wants_logprobs=True)
        if call.stream:
            raise BadRequest("stream is for agents; without a trajectory in its URL, a call is answered whole")
        began, version = time.time(), self._pool.policy_version
        reply = await self._engines.send(kind.upstream, call.request)
        body = await reply.read()
        if reply.status != 200:
            return relayed(reply.status, body)
        got, steps = await self._understood(call, reply, body, _context(call, reply, version, began))
        told = _told(got, steps)
        read = sum(len(step.prompt_ids) for step in steps[:: call.choices_per_prompt])
        written = sum(len(step.response_ids) for step in steps)
        self._sight.call_done(f"whitebox_{kind}", 200, time.time() - began, None, read, written)
        return Response(told, media_type=JSON)

    async def _understood(
        self, call: ModelCall, reply: EngineReply, body: bytes, context: CallContext
    ) -> tuple[ChoicesReply, list[Step]]:
        """The answer brought to its end, and each choice as the step it would be."""
        got = read_reply(body, call, reply.engine.kind)
        if got.is_aborted:
            self._sight.call_continued(f"whitebox_{call.kind}")
            got = await self._continuation.whole(call, got, reply.version_before)
        choices: Sequence[Sampled] = got.choices
        if context.exactness is Exactness.RETOKENIZED:
            choices = await self._recording.retokenize(call, choices, got.texts())
        steps = build_steps(context, choices, got.usage)
        return got, await self._sealed(steps, reply.engine)

    async def _sealed(self, steps: Sequence[Step], engine: EngineReplica) -> list[Step]:
        try:
            for step in steps:
                self._versions.note(step, engine)
            return await self._versions.seal(steps)
        finally:
            for step in steps:
                self._versions.forget(step)


def _context(call: ModelCall, reply: EngineReply, version: int, began: float) -> CallContext:
    """No prompt is too long here: only the environment knows how much its trainer takes."""
    return CallContext(
        trajectory_uid="",
        prompt_uid="",
        policy_version=version if reply.version_before is None else reply.version_before,
        started_at=began,
        sampling=call.sampling,
        prompt_length=sys.maxsize,
        exactness=Exactness.ENGINE if reply.engine.facts.token_ids else Exactness.RETOKENIZED,
        choices_per_prompt=call.choices_per_prompt,
    )


def _told(reply: ChoicesReply, steps: Sequence[Step]) -> bytes:
    """The engine's own answer, and with each choice what is known of who wrote it."""
    for choice, step in zip(reply.message["choices"], steps, strict=True):
        if step.exactness is Exactness.ENGINE and step.quarantine is not None:
            raise EngineUnavailable(f"the engine's answer cannot be trained on: {step.quarantine}")
        if step.exactness is Exactness.RETOKENIZED:
            _tell_ids(reply.message if "message" in choice else choice, choice, step)
        choice["exactness"] = step.exactness
        choice["policy_version"] = step.policy_version
        choice["version_spans"] = [list(span) for span in step.version_spans]
    return write_object(reply.message, "answer")


def _tell_ids(prompt_holder: dict[str, Any], choice: dict[str, Any], step: Step) -> None:
    """Where vLLM would have them: a chat's prompt with the answer, a completion's with each choice."""
    prompt_holder["prompt_token_ids"] = step.prompt_ids.tolist() or None
    choice["token_ids"] = step.response_ids.tolist() if step.quarantine is None else None


def _asked(schema: dict[str, Any]) -> dict[str, Any]:
    """What a route that reads its body itself says of it."""
    fields = {name: field for name, field in schema["properties"].items() if name not in NOT_ASKED}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": {**schema, "properties": fields}}}}}


async def _while_there(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """The answer, unless the client leaves before: then the engine is freed."""
    answer, gone = asyncio.create_task(answering), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else Response(status_code=CLIENT_GONE)
    finally:
        answer.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
