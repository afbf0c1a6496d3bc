"""The dashboard's HTTP interface below /api, for the page and for `stepwell status`."""

import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Response

from stepwell.common.coalescing import SharedAnswer
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.http import json_response
from stepwell.dashboard.index.texts import ConversationTexts
from stepwell.dashboard.index.trajectories import TrajectoryIndex
from stepwell.dashboard.queries import DashboardQueries
from stepwell.dashboard.request_shapes import CurationAsked, TrajectoriesAsked, Uid
from stepwell.dashboard.status import StatusQuery
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.series import TimeSeries

FACETS = {
    "channels": "channel",
    "states": "state",
    "causes": "cause",
    "exactness": "exactness",
    "marks": "mark",
    "sources": "source",
}
MAX_SERIES_SECONDS = 24 * 3600.0


def api_router(
    pool: PoolReader,
    queries: DashboardQueries,
    status: StatusQuery,
    series: Callable[[float], SharedAnswer[TimeSeries]],
    gateways: GatewayMonitor,
    index: TrajectoryIndex,
    texts: ConversationTexts,
) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.get("/status")
    async def status_now(fresh: bool = False) -> Response:
        """The pool, its channels, the gateways and engines, some seconds old; with fresh=true, current."""
        return json_response(await status.read(fresh=fresh))

    @router.get("/series")
    async def series_of(seconds: Annotated[float, Query(ge=5, le=MAX_SERIES_SECONDS)] = 900.0) -> Response:
        """Time series of the last seconds."""
        found = await series(seconds).get()
        since = time.time() - seconds
        latencies = {watched.url: watched.series(since) for watched in gateways.watched}
        return json_response(
            {"interval": found.interval, "ends": found.ends, "channels": found.channels, "gateways": latencies}
        )

    @router.get("/trajectories")
    async def trajectories(asked: Annotated[TrajectoriesAsked, Query()]) -> Response:
        """A page of the trajectories that match every filter."""
        found = await queries.find(asked.search(), asked.text)
        return json_response(
            {
                "total": found.total,
                "matched": found.matched,
                "texts": {"indexed": len(texts), "of": len(index)},
                "rows": found.rows,
                "facets": {name: found.facets[column] for name, column in FACETS.items()},
            }
        )

    @router.get("/trajectory")
    async def trajectory(trajectory_uid: Uid, prompt_uid: Uid) -> Response:
        """One trajectory, step by step and token by token."""
        return json_response(await queries.trajectory((trajectory_uid, prompt_uid)))

    @router.get("/group")
    async def group(prompt_uid: Uid, group: int | None = None, shard: str | None = None) -> Response:
        """The rollouts of one group; without a group, of the prompt's last one."""
        return json_response(await queries.group(prompt_uid, group, shard or None))

    @router.post("/curate")
    async def curate(asked: CurationAsked) -> Response:
        """Mark, unmark, reject or relabel trajectories; returns the outcome for each."""
        return json_response({"outcomes": await queries.curate(asked.curations())})

    @router.get("/audit")
    async def audit(limit: Annotated[int, Query(ge=1, le=10_000)] = 200, trajectory_uid: str | None = None) -> Response:
        """The last curation decisions, newest first."""
        return json_response({"entries": await pool.audit(limit, trajectory_uid or None)})

    return router
