"""The gateway's ASGI application, put together from what it is handed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import nullcontext
from typing import Any

from fastapi import FastAPI, Response

from stepwell.common.access_keys import AccessKeys
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.http import error_responses as answers
from stepwell.gateway.http import tracing
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.recording.step_builder import StepBuilder
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
from stepwell.gateway.rollouts import TrajectoryLifecycle
from stepwell.gateway.routes.access import BELOW_A_TRAJECTORY
from stepwell.gateway.routes.asgi import GatewayAsgi, MountedApp
from stepwell.gateway.routes.fast_routes import FastRoutes
from stepwell.gateway.routes.openapi import documented
from stepwell.gateway.routes.operator_routes import operator_router, show
from stepwell.gateway.routes.readiness import ReadinessCheck
from stepwell.gateway.routes.trajectory_routes import opening_router, trajectory_router
from stepwell.gateway.routes.unrecorded_calls import UnrecordedCalls, unrecorded_router
from stepwell.gateway.routes.whitebox_routes import whitebox_router
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.pool.api.ports import RewardScorer, StepSink

DRAIN_TIMEOUT = 30.0
"""Seconds a gateway that is told to end waits for the pool to take its last steps."""


def create_app(
    *,
    pool: StepSink,
    engines: EngineFleet,
    tokenizer: BackgroundTokenizer,
    rewards: RewardScorer | None,
    prompt_length: int,
    response_length: int,
    keys: AccessKeys,
    spool: Spool | None = None,
    is_durable: bool = False,
    atropos: MountedApp | None = None,
) -> GatewayAsgi:
    sight, traces = GatewayMetrics(), tracing.start()
    known, versions = KnownTrajectories(pool), VersionConfirmer(engines)
    recorder = Outbox(pool, on_refused=known.forget, sealer=versions, spool=spool)
    readiness = ReadinessCheck(pool, engines, tokenizer, rewards)
    recording = StepBuilder(recorder, versions, tokenizer, sight, prompt_length=prompt_length, is_durable=is_durable)
    calls = AgentCalls(
        pool=pool,
        engines=engines,
        known=known,
        recording=recording,
        sight=sight,
        tracing=traces,
        response_length=response_length,
    )
    show(sight, calls, engines, recorder, spool)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tokenizer.start()
        works = (recorder.run(), pool.follow(), readiness.announce(), calls.keep_alives.run(), sight.watch_loop())
        try:
            async with engines, _running(engines.watch(), *works), atropos.running() if atropos else nullcontext():
                yield
                await recorder.drain(DRAIN_TIMEOUT)
        finally:
            await traces.close()
            if spool is not None:
                spool.close()

    app = FastAPI(
        title="Stepwell gateway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    answers.install(app)
    app.include_router(operator_router(engines, readiness, sight))
    chat = UnrecordedCalls(pool, engines, recording, versions, sight, response_length=response_length)
    app.include_router(unrecorded_router(chat))
    rollouts = TrajectoryLifecycle(pool, recorder, known, keys)
    app.add_middleware(FastRoutes, rollouts)
    app.include_router(opening_router(rollouts, pool))
    app.include_router(
        whitebox_router(
            pool, engines, tokenizer, rewards, sight, prompt_length=prompt_length, response_length=response_length
        )
    )
    below = trajectory_router(rollouts, pool, engines, recorder, known)
    for prefix in BELOW_A_TRAJECTORY:
        app.include_router(below, prefix="/{trajectory_uid}/{prompt_uid}" + prefix, include_in_schema=prefix == "/v1")

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(documented(app.openapi()), media_type=answers.JSON)

    return GatewayAsgi(app, calls, keys, atropos)


@contextlib.asynccontextmanager
async def _running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
