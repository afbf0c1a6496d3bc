"""The dashboard's ASGI application, put together from what it is handed."""

import contextlib
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI, Response

from stepwell.common.access_keys import AccessKeys
from stepwell.common.async_calls import repeating
from stepwell.common.coalescing import SharedAnswer
from stepwell.common.tokenizers import TokenDecoder, Tokenizer
from stepwell.dashboard import http as answers
from stepwell.dashboard.gateway_monitor import Gateways
from stepwell.dashboard.index.follower import Following
from stepwell.dashboard.index.indexing import Indexing
from stepwell.dashboard.index.texts import Texts
from stepwell.dashboard.index.trajectories import Index
from stepwell.dashboard.metrics import Metrics
from stepwell.dashboard.page import page_router
from stepwell.dashboard.queries import Desk
from stepwell.dashboard.routes import LONGEST, api_router
from stepwell.dashboard.status import About, Status
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.series import TimeSeries

SPANS = (60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, LONGEST)


def create_dashboard(
    *,
    pool: PoolReader,
    keys: AccessKeys,
    limits: Limits,
    tokenizer: Tokenizer | None,
    gateways: Gateways,
    about: About,
) -> FastAPI:
    index, texts, decoder = Index(), Texts(), TokenDecoder(tokenizer)
    following, indexing = Following(pool, index, texts), Indexing(pool, texts, decoder)
    stats, series = SharedAnswer(pool.stats), SharedSeries(pool)
    status = Status(about, stats, gateways, index, texts, following)
    desk = Desk(pool, limits, stats, index, texts, following, decoder)
    metrics = Metrics(stats, index, following)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        decoder.start()
        try:
            async with gateways.watching(), repeating(following.look, indexing.look):
                yield
        finally:
            await stats.close()
            await series.close()

    app = FastAPI(
        title="Stepwell dashboard",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    answers.install(app, keys)
    app.include_router(api_router(pool, desk, status, series.of, gateways, index, texts))
    app.include_router(page_router())

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answers while the process lives."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics_now() -> Response:
        """The pool's figures, for Prometheus."""
        body, content_type = await metrics.exposition()
        return Response(body, media_type=content_type)

    return app


class SharedSeries:
    """The last minutes and hours, each span shared by all who ask for it or for a little less."""

    def __init__(self, pool: PoolReader) -> None:
        self._spans = {span: SharedAnswer(partial(pool.series, seconds=span)) for span in SPANS}

    def of(self, seconds: float) -> SharedAnswer[TimeSeries]:
        return self._spans[min(span for span in SPANS if span >= seconds)]

    async def close(self) -> None:
        for shared in self._spans.values():
            await shared.close()
