"""The dashboard's ASGI application: built from its parts, with the files of the page."""

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from fastapi import APIRouter, FastAPI, HTTPException, Response

from stepwell.common.access_keys import AccessKeys
from stepwell.common.async_calls import repeating
from stepwell.common.coalescing import SharedAnswer
from stepwell.common.tokenizers import TokenDecoder, Tokenizer
from stepwell.dashboard import http
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.index.follower import PoolFollower, TextIndexer
from stepwell.dashboard.index.texts import ConversationTexts
from stepwell.dashboard.index.trajectories import TrajectoryIndex
from stepwell.dashboard.metrics import PoolMetrics
from stepwell.dashboard.queries import DashboardQueries
from stepwell.dashboard.routes import MAX_SERIES_SECONDS, api_router
from stepwell.dashboard.status import PoolDescription, StatusQuery
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.series import TimeSeries

SERIES_SPANS = (60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, MAX_SERIES_SECONDS)
PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
"""Of the page's files. The system's own table is not used, because it may name another type for JavaScript."""


def create_dashboard(
    *,
    pool: PoolReader,
    keys: AccessKeys,
    limits: Limits,
    tokenizer: Tokenizer | None,
    gateways: GatewayMonitor,
    description: PoolDescription,
) -> FastAPI:
    index, texts, decoder = TrajectoryIndex(), ConversationTexts(), TokenDecoder(tokenizer)
    follower, indexer = PoolFollower(pool, index, texts), TextIndexer(pool, texts, decoder)
    stats, series = SharedAnswer(pool.stats), SharedSeries(pool)
    status = StatusQuery(description, stats, gateways, index, texts, follower)
    queries = DashboardQueries(pool, limits, stats, index, texts, follower, decoder)
    metrics = PoolMetrics(stats, index, follower)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        decoder.start()
        try:
            async with gateways.watching(), repeating(follower.poll, indexer.poll):
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
    http.install(app, keys)
    app.include_router(api_router(pool, queries, status, series.of, gateways, index, texts))
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
    """Time series of a few spans. Callers share the answer for the shortest span that is long enough."""

    def __init__(self, pool: PoolReader) -> None:
        self._spans = {span: SharedAnswer(partial(pool.series, seconds=span)) for span in SERIES_SPANS}

    def of(self, seconds: float) -> SharedAnswer[TimeSeries]:
        return self._spans[min(span for span in SERIES_SPANS if span >= seconds)]

    async def close(self) -> None:
        for shared in self._spans.values():
            await shared.close()


def page_router() -> APIRouter:
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return _page_file("index.html")

    @router.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str) -> Response:
        return _page_file(name)

    return router


def _page_file(name: str) -> Response:
    path = (PAGE / name).resolve()
    media_type = MEDIA_TYPES.get(path.suffix)
    if media_type is None or not path.is_relative_to(PAGE) or not path.is_file():
        raise HTTPException(404, "not found")
    return Response(path.read_bytes(), media_type=media_type)
