"""The gateway's ASGI application, put together from what it is handed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Response

from stepwell.core.ports import PoolPort, RewardPort
from stepwell.gateway import answers
from stepwell.gateway.blackbox import KnownTrajectories, opening_router, trajectory_router
from stepwell.gateway.engine import Engines
from stepwell.gateway.readiness import ReadinessCheck
from stepwell.gateway.recorder import Recorder
from stepwell.gateway.tokenizer import BackgroundTokenizer
from stepwell.gateway.whitebox import whitebox_router
from stepwell.wire import gateway as shapes

BELOW_A_TRAJECTORY = ("/v1", "", "/v1/v1")
"""An agent may append /v1 or not, to a base_url that ends in /v1 or not: all are meant."""
DRAIN_TIMEOUT = 30.0
"""Seconds a gateway that is told to end waits for the pool to take its last steps."""


def create_app(
    *,
    pool: PoolPort,
    engines: Engines,
    tokenizer: BackgroundTokenizer,
    rewards: RewardPort | None,
    prompt_length: int,
    response_length: int,
) -> FastAPI:
    known = KnownTrajectories(pool)
    recorder = Recorder(pool, on_refused=known.forget)
    readiness = ReadinessCheck(pool, engines, tokenizer, rewards)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tokenizer.start()
        async with engines:
            tasks = [asyncio.create_task(work) for work in (recorder.run(), pool.follow(), readiness.announce())]
            try:
                yield
                await recorder.drain(DRAIN_TIMEOUT)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title="Stepwell gateway", lifespan=lifespan)
    answers.install(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(response: Response) -> shapes.Readiness:
        missing = await readiness.missing()
        response.status_code = 503 if missing else 200
        return shapes.Readiness(ready=not missing, missing=missing)

    @app.get("/v1/models")
    async def models() -> Response:
        answer = await engines.models()
        return answers.relayed(answer.status, answer.body)

    lengths = {"prompt_length": prompt_length, "response_length": response_length}
    app.include_router(opening_router(pool, known))
    app.include_router(whitebox_router(pool, engines, tokenizer, rewards, **lengths))
    below = trajectory_router(pool, engines, recorder, known, **lengths)
    for prefix in BELOW_A_TRAJECTORY:
        app.include_router(below, prefix="/{trajectory_uid}/{prompt_uid}" + prefix, include_in_schema=prefix == "/v1")
    return app
