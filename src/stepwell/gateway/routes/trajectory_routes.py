"""Routes for black-box agents: how a trajectory gets its base_url, and how the agent's owner steers it.

The agent's own calls are in gateway/agent_calls.py. FastRoutes serves /init_trajectory and /complete_trajectory in most
cases.
"""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from stepwell.access.access_keys import is_in_url
from stepwell.access.caller import Caller, SessionKey, caller_of
from stepwell.access.route_table import MODELS, ROOTS, UNRECORDED_ROOTS
from stepwell.engines.fleet import EngineFleet
from stepwell.errors import UnknownAddress
from stepwell.gateway.error_responses import relay
from stepwell.gateway.trajectory_lifecycle import TrajectoryLifecycle
from stepwell.pool.api.producing import TRAIN, TrajectoryRef
from stepwell.pool.api.sessions import V1_ROOT
from stepwell.pool.client import PoolClient
from stepwell.wire import gateway_api


async def ref_from_path(
    trajectory_uid: Annotated[gateway_api.Uid, Path()], prompt_uid: Annotated[gateway_api.Uid, Path()]
) -> TrajectoryRef:
    """A coroutine, because FastAPI calls any other callable (also a class) in a thread, which costs half a
    millisecond."""
    return TrajectoryRef(trajectory_uid, prompt_uid)


Ref = Annotated[TrajectoryRef, Depends(ref_from_path)]


async def caller_of_request(request: Request) -> Caller:
    return caller_of(request.scope)


By = Annotated[Caller, Depends(caller_of_request)]
"""The caller of the request."""


async def open_as_asked(
    lifecycle: TrajectoryLifecycle, wanted: gateway_api.InitTrajectory, request: Request
) -> gateway_api.TrajectoryOpened:
    key = is_in_url(request.headers.get("authorization"))
    return await lifecycle.open(wanted, str(request.base_url), caller_of(request.scope), is_key_in_url=key)


def opening_router(lifecycle: TrajectoryLifecycle, pool: PoolClient, engines: EngineFleet) -> APIRouter:
    """Routes that name no trajectory."""
    router = APIRouter()

    @router.post("/init_trajectory")
    async def init_trajectory(
        request: Request, wanted: gateway_api.InitTrajectory | None = None
    ) -> gateway_api.TrajectoryOpened:
        """Open a trajectory, and get the base_url and key to give to its agent."""
        wanted = wanted or gateway_api.InitTrajectory()
        return await open_as_asked(lifecycle, wanted, request)

    @router.post("/session_keys")
    async def issue_session_key(request: Request, wanted: gateway_api.IssueSessionKey) -> gateway_api.SessionKeyIssued:
        """A key by which a user opens sessions, and its base_url. Nothing is stored: the key is the same each time."""
        key = lifecycle.keys.session_key(SessionKey(wanted.user, wanted.capture))
        base_url = f"{request.base_url}{V1_ROOT}"
        return gateway_api.SessionKeyIssued(user=wanted.user, base_url=base_url, api_key=key)

    async def models() -> Response:
        """The engines' models."""
        return relay(*await engines.models())

    for root in (*ROOTS, *UNRECORDED_ROOTS):
        router.get(f"{root}/{MODELS}", include_in_schema=root == ROOTS[0])(models)

    @router.get("/pacing")
    async def pacing(by: By, channel: Annotated[gateway_api.ChannelName, Query()] = TRAIN) -> gateway_api.PacingNow:
        """How many trajectories may start now, and which groups want another."""
        by.require_channel(channel)
        return gateway_api.PacingNow.model_validate(await pool.pacing(channel), from_attributes=True)

    @router.post("/v1/{rest:path}", include_in_schema=False)
    async def no_trajectory(rest: str) -> None:
        raise UnknownAddress(f"there is no /v1/{rest} here; docs/api.md has what there is")

    return router


def trajectory_router(lifecycle: TrajectoryLifecycle, engines: EngineFleet) -> APIRouter:
    """Routes below a trajectory's base_url, beside the agent's own calls."""
    router = APIRouter()

    @router.post("/register_trajectory")
    async def register_trajectory(
        ref: Ref, by: By, wanted: gateway_api.RegisterTrajectory | None = None
    ) -> gateway_api.Registered:
        """Say more of a trajectory: its channel, before its first call, and its metadata."""
        await lifecycle.register(ref, wanted or gateway_api.RegisterTrajectory(), by)
        return gateway_api.Registered()

    @router.post("/complete_trajectory")
    async def complete_trajectory(
        ref: Ref, by: By, wanted: gateway_api.CompleteTrajectory | None = None
    ) -> gateway_api.TrajectoryEnded:
        """The rollout is over; its reward, if it has one already."""
        return await lifecycle.complete(ref, wanted or gateway_api.CompleteTrajectory(), by)

    @router.post("/abort_trajectory")
    async def abort_trajectory(
        ref: Ref, by: By, wanted: gateway_api.AbortTrajectory | None = None
    ) -> gateway_api.TrajectoryEnded:
        """The rollout failed: its steps are dropped, its place in the group is free again."""
        return await lifecycle.abort(ref, wanted or gateway_api.AbortTrajectory(), by)

    @router.post("/feedback")
    async def feedback(ref: Ref, by: By, given: gateway_api.Feedback) -> gateway_api.FeedbackGiven:
        """Score a trajectory or one of its steps, or score it anew, now or long after its end."""
        is_counted = await lifecycle.give_reward(ref, given, by)
        return gateway_api.FeedbackGiven(status="counted" if is_counted else "late")

    @router.get("/models")
    async def models(ref: Ref) -> Response:
        """The engines' models."""
        return relay(*await engines.models())

    return router
