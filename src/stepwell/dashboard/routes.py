"""The dashboard's HTTP interface, below /api: what the page and `stepwell status` read, and what a person decides."""

import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Response

from stepwell.common.coalescing import SharedAnswer
from stepwell.dashboard.gateway_monitor import Gateways
from stepwell.dashboard.http import json_answer
from stepwell.dashboard.index.texts import Texts
from stepwell.dashboard.index.trajectories import Index
from stepwell.dashboard.queries import Desk
from stepwell.dashboard.request_shapes import CurationAsked, TrajectoriesAsked, Uid
from stepwell.dashboard.status import Status
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
LONGEST = 24 * 3600.0


def api_router(
    pool: PoolReader,
    desk: Desk,
    status: Status,
    series: Callable[[float], SharedAnswer[TimeSeries]],
    gateways: Gateways,
    index: Index,
    texts: Texts,
) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.get("/status")
    async def status_now(fresh: bool = False) -> Response:
        """The pool, its channels, the gateways and engines, as they were some seconds ago; with fresh=true, now."""
        return json_answer(await status.look(fresh=fresh))

    @router.get("/series")
    async def series_of(seconds: Annotated[float, Query(ge=5, le=LONGEST)] = 900.0) -> Response:
        """What happened in the last so many seconds."""
        found = await series(seconds).get()
        since = time.time() - seconds
        latencies = {watched.url: watched.series(since) for watched in gateways.watched}
        return json_answer(
            {"interval": found.interval, "ends": found.ends, "channels": found.channels, "gateways": latencies}
        )

    @router.get("/trajectories")
    async def trajectories(asked: Annotated[TrajectoriesAsked, Query()]) -> Response:
        """A page of those that match every filter."""
        found = await desk.find(asked.search(), asked.text)
        return json_answer(
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
        """One of them, step by step and token by token."""
        return json_answer(await desk.trajectory((trajectory_uid, prompt_uid)))

    @router.get("/group")
    async def group(prompt_uid: Uid, group: int | None = None, shard: str | None = None) -> Response:
        """The rollouts of one group; of the prompt's last one, if none is named."""
        return json_answer(await desk.group(prompt_uid, group, shard or None))

    @router.post("/curate")
    async def curate(asked: CurationAsked) -> Response:
        """Mark, unmark, reject or relabel; says what became of each."""
        return json_answer({"outcomes": await desk.curate(asked.curations())})

    @router.get("/audit")
    async def audit(limit: Annotated[int, Query(ge=1, le=10_000)] = 200, trajectory_uid: str | None = None) -> Response:
        """The last decisions, newest first."""
        return json_answer({"entries": await pool.audit(limit, trajectory_uid or None)})

    return router
