"""The dashboard's HTTP interface below /api, for the page and for `stepwell status`."""

import time
from typing import Annotated, Self

from fastapi import APIRouter, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from stepwell.access.caller import caller_of
from stepwell.dashboard.http import json_response
from stepwell.dashboard.index import Search
from stepwell.dashboard.queries import MAX_SERIES_SECONDS, DashboardQueries, DashboardState, read_status
from stepwell.errors import BadRequest
from stepwell.pool.client import Curation, CurationAction

FACETS = {
    "channels": "channel",
    "states": "state",
    "causes": "cause",
    "exactness": "exactness",
    "marks": "mark",
    "sources": "source",
}


Uid = Annotated[str, Field(min_length=1, max_length=1_000)]


class DashboardBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrajectoryName(DashboardBody):
    trajectory_uid: Uid
    prompt_uid: Uid


class CurationAsked(DashboardBody):
    action: CurationAction
    trajectories: list[TrajectoryName] = Field(min_length=1, max_length=500)
    by: Annotated[str, Field(max_length=80)] = ""
    """Who decides, where no keys are checked. Where they are, the key says it."""
    why: str = Field(default="", max_length=500)
    mark: Annotated[str, Field(max_length=40), AfterValidator(str.strip)] = ""
    reward: FiniteFloat | None = None

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if self.action in (CurationAction.MARK, CurationAction.UNMARK) and not self.mark:
            raise ValueError(f"{self.action} needs a mark: a short word")
        if self.action is CurationAction.RELABEL and self.reward is None:
            raise ValueError("relabel needs a reward: a number")
        return self

    def curations(self, key_id: str) -> list[Curation]:
        if not (by := key_id or self.by):
            raise BadRequest("by: a decision names its author")
        decision = {**self.model_dump(exclude={"trajectories"}), "by": by}
        return [Curation(**decision, **named.model_dump()) for named in self.trajectories]


def api_router(state: DashboardState) -> APIRouter:
    queries = DashboardQueries(state)
    router = APIRouter(prefix="/api")

    @router.get("/me")
    async def me(request: Request) -> Response:
        """The id and the role of the key that this request carries; the id is empty if no keys are checked."""
        caller = caller_of(request.scope)
        return json_response({"id": caller.id, "role": caller.role})

    @router.get("/status")
    async def status_now(fresh: bool = False) -> Response:
        """The pool, its channels, the gateways and engines, some seconds old; with fresh=true, current."""
        return json_response(await read_status(state, fresh=fresh))

    @router.get("/series")
    async def series_of(seconds: Annotated[float, Query(ge=5, le=MAX_SERIES_SECONDS)] = 900.0) -> Response:
        """Time series of the last seconds; `missing` names the shards that did not answer."""
        found = await state.series(seconds)
        since = time.time() - seconds
        latencies = {watched.url: watched.series(since) for watched in state.gateways.watched}
        of_pool = {"interval": found.interval, "ends": found.ends, "channels": found.channels, "missing": found.missing}
        return json_response({**of_pool, "gateways": latencies})

    @router.get("/trajectories")
    async def trajectories(search: Annotated[Search, Query()]) -> Response:
        """A page of the trajectories that match every filter."""
        found = await queries.find(search)
        return json_response(
            {
                "total": found.total,
                "matched": found.matched,
                "texts": {"indexed": len(state.texts), "of": len(state.index)},
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

    @router.get("/preview")
    async def preview(channel: Uid) -> Response:
        """The batch that the channel's trainer would get now, and the oldest groups that are not in it, with reasons.
        Nothing is taken."""
        known = sorted((await state.stats.get()).channels)
        return json_response(await state.next_batches.of(channel, known))

    router.include_router(_curation_router(state))
    return router


def _curation_router(state: DashboardState) -> APIRouter:
    router = APIRouter()

    @router.post("/curate")
    async def curate(request: Request, asked: CurationAsked) -> Response:
        """Mark, unmark, reject or relabel trajectories; returns the outcome for each."""
        curations = asked.curations(caller_of(request.scope).id)
        try:  # one after the other, so that a long list does not block the pool
            outcomes = {wanted.trajectory_uid: await state.pool.curate(wanted) for wanted in curations}
        finally:
            await state.follower.poll()
        return json_response({"outcomes": outcomes})

    @router.get("/audit")
    async def audit(limit: Annotated[int, Query(ge=1, le=10_000)] = 200, trajectory_uid: str | None = None) -> Response:
        """The last curation decisions, newest first; `missing` names the shards that did not answer."""
        page = await state.pool.audit(limit, trajectory_uid or None)
        return json_response({"entries": page.entries, "missing": page.missing})

    return router
