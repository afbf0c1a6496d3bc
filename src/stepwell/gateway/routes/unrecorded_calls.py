"""Model calls that are not recorded, for clients that keep their tokens themselves, such as environments.

The calls are at the gateway's root, where the URL names no trajectory. They are forwarded like an agent's: every
sampling parameter explicit, to a healthy engine, held while engines pause, continued if an engine breaks off.

- Ids and log-probabilities that the engine gives are consistent, or the call fails.
- Ids that are made from text are marked as such. A choice whose ids cannot be made has none.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReplica
from stepwell.engines.replies import EngineReply
from stepwell.errors import BadRequest, EngineUnavailable, StepwellError
from stepwell.gateway.continuation import Continuation
from stepwell.gateway.dialects.dialect import CallSurroundings, Dialect, ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesReply, Wants, read_reply
from stepwell.gateway.http.error_responses import JSON, ErrorDetails, describe_logged, describe_refusal
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.recording.step_builder import CallContext, StepBuilder, build_steps
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
from stepwell.gateway.routes.openapi import json_content
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.steps.step import Exactness, Step
from stepwell.wire.openai import Upstream

NOT_ASKED = ("stream", "stream_options", "return_token_ids")
"""Fields of an agent's call that mean nothing here: the answer is whole and has its ids."""
CLIENT_GONE = 499
"""The status of a response to a client that has left."""
NO_TRAJECTORY = TrajectoryRef("", "")
EVERYTHING = Wants(ids=True, logprobs=True, usage=True)


def unrecorded_router(calls: "UnrecordedCalls", dialects: Sequence[Dialect]) -> APIRouter:
    router = APIRouter()
    for dialect in dialects:
        for path in dialect.paths:
            router.add_api_route(
                f"/v1/{path}",
                _handler(calls, dialect),
                methods=["POST"],
                name=path.replace("/", "_"),
                description=dialect.unrecorded_description,
                openapi_extra=_request_body(dialect.request_schema),
            )
    return router


def _handler(calls: "UnrecordedCalls", dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await _while_connected(request, calls.answer(dialect, await request.body()))
        except StepwellError as failure:
            return _error(dialect, describe_logged(failure, f"{request.method} {request.url.path}"))

    return handle


class UnrecordedCalls:
    def __init__(
        self,
        pool: StepSink,
        engines: EngineFleet,
        steps: StepBuilder,
        confirmer: VersionConfirmer,
        metrics: GatewayMetrics,
        around: CallSurroundings,
    ) -> None:
        self._pool = pool
        self._engines = engines
        self._steps = steps
        self._confirmer = confirmer
        self._metrics = metrics
        self._around = around
        self._continuation = Continuation(engines)

    async def answer(self, dialect: Dialect, raw: bytes) -> Response:
        call = dialect.read(raw, self._around)._replace(wants=EVERYTHING)
        if call.stream:
            raise BadRequest("stream is for agents; without a trajectory in its URL, a call is answered whole")
        began, version = time.time(), self._pool.policy_version
        reply = await self._engines.send(call.upstream, call.request)
        body = await reply.read()
        if reply.status != 200:
            return _error(dialect, describe_refusal(reply.status, body))
        # no prompt is too long here: only the environment knows the longest prompt of its trainer
        context = replace(
            self._steps.context(NO_TRAJECTORY, call, reply, version, began, None), prompt_length=sys.maxsize
        )
        answer, steps = await self._complete(call, reply, body, context)
        _add_origins(call, answer, steps)
        read = sum(len(step.prompt_ids) for step in steps[:: call.choices_per_prompt])
        written = sum(len(step.response_ids) for step in steps)
        self._metrics.call_done(f"whitebox_{dialect.name}", 200, time.time() - began, None, read, written)
        return Response(dialect.reply(call, answer), media_type=JSON)

    async def _complete(
        self, call: ModelCall, reply: EngineReply, body: bytes, context: CallContext
    ) -> tuple[ChoicesReply, list[Step]]:
        """The complete answer, and each choice as the step that it would be."""
        answer = read_reply(body, reply.engine.kind, keep_ids=True)
        if answer.is_aborted:
            self._metrics.calls_continued[f"whitebox_{call.dialect.name}"].inc()
            answer = await self._continuation.whole(call, answer, reply.version_before)
        choices = await self._steps.with_ids(context, call, answer.choices, answer.texts)
        return answer, await self._confirm(build_steps(context, choices, answer.usage), reply.engine)

    async def _confirm(self, steps: Sequence[Step], engine: EngineReplica) -> list[Step]:
        try:
            for step in steps:
                self._confirmer.note(step, engine)
            return await self._confirmer.confirm(steps)
        finally:
            for step in steps:
                self._confirmer.forget(step)


def _add_origins(call: ModelCall, answer: ChoicesReply, steps: Sequence[Step]) -> None:
    """Add to each choice which weights wrote it and how exact its ids are."""
    for choice, step in zip(answer.message["choices"], steps, strict=True):
        if step.exactness is Exactness.ENGINE and step.quarantine is not None:
            raise EngineUnavailable(f"the engine's answer cannot be trained on: {step.quarantine}")
        if step.exactness is Exactness.RETOKENIZED:
            _add_ids(answer.message if call.upstream is Upstream.CHAT else choice, choice, step)
        choice["exactness"] = step.exactness
        choice["policy_version"] = step.policy_version
        choice["version_spans"] = [list(span) for span in step.version_spans]


def _add_ids(prompt_holder: dict[str, Any], choice: dict[str, Any], step: Step) -> None:
    """Where vLLM has them: a chat's prompt ids are in the answer, a completion's in each choice."""
    prompt_holder["prompt_token_ids"] = step.prompt_ids.tolist() or None
    choice["token_ids"] = step.response_ids.tolist() if step.quarantine is None else None


def _request_body(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a body that the route reads by itself."""
    fields = {name: field for name, field in schema["properties"].items() if name not in NOT_ASKED}
    return {"requestBody": {"required": True, "content": json_content({**schema, "properties": fields})}}


def _error(dialect: Dialect, error: ErrorDetails) -> Response:
    return Response(dialect.error(error), error.status, error.headers, JSON)


async def _while_connected(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """The answer. If the client leaves before it, the engine is freed."""
    answer, gone = asyncio.create_task(answering), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else Response(status_code=CLIENT_GONE)
    finally:
        answer.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
