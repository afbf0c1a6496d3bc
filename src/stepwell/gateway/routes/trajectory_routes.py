"""Black-box agents: how a trajectory gets its base_url, and how whoever runs the agent steers it.

The agent's own calls are in calls.py. The two calls of every rollout, init and complete, seldom get as far as here:
quick.py is faster.
"""

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from stepwell.engines.fleet import EngineFleet
from stepwell.errors import BadRequest
from stepwell.gateway.http.error_responses import relayed
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.rollouts import TrajectoryLifecycle
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import TRAIN, Registration, RewardGiven, TrajectoryRef
from stepwell.wire import gateway_api as shapes

log = logging.getLogger("stepwell.gateway")


async def ref_from_path(
    trajectory_uid: Annotated[shapes.Uid, Path()], prompt_uid: Annotated[shapes.Uid, Path()]
) -> TrajectoryRef:
    """A coroutine, for FastAPI calls what is none (a class, too) in a thread: half a millisecond for nothing."""
    return TrajectoryRef(trajectory_uid, prompt_uid)


Ref = Annotated[TrajectoryRef, Depends(ref_from_path)]


def opening_router(rollouts: TrajectoryLifecycle, pool: StepSink) -> APIRouter:
    """How a trajectory gets its base_url, and what those are told who have none."""
    router = APIRouter()

    @router.post("/init_trajectory")
    async def init_trajectory(request: Request, wanted: shapes.InitTrajectory | None = None) -> shapes.TrajectoryOpened:
        """Open a trajectory, and get the base_url and key to give to its agent."""
        return await rollouts.open(wanted or shapes.InitTrajectory(), str(request.base_url))

    @router.get("/pacing")
    async def pacing(channel: Annotated[shapes.ChannelName, Query()] = TRAIN) -> shapes.PacingNow:
        """How many trajectories may start now, and which groups want another."""
        now = await pool.pacing(channel)
        return shapes.PacingNow(
            may_start=now.may_start,
            in_flight=now.in_flight,
            queued=now.queued,
            refills=[shapes.RefillWanted(prompt_uid=r.prompt_uid, missing=r.missing) for r in now.refills],
        )

    @router.post("/v1/{rest:path}", include_in_schema=False)
    async def no_trajectory(rest: str) -> None:
        raise BadRequest(f"/v1/{rest} names no trajectory; take a base_url from POST /init_trajectory")

    return router


def trajectory_router(
    rollouts: TrajectoryLifecycle, pool: StepSink, engines: EngineFleet, recorder: Outbox, known: KnownTrajectories
) -> APIRouter:
    """What stands below a trajectory's base_url, beside the agent's own calls."""
    router = APIRouter()

    @router.post("/register_trajectory")
    async def register_trajectory(ref: Ref, wanted: shapes.RegisterTrajectory) -> shapes.Registered:
        """Say more of a trajectory: its channel, before its first call, and its metadata."""
        await pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, metadata=wanted.metadata)
        )
        known.add(ref)
        return shapes.Registered()

    @router.post("/complete_trajectory")
    async def complete_trajectory(ref: Ref, wanted: shapes.CompleteTrajectory | None = None) -> shapes.TrajectoryEnded:
        """The rollout is over; its reward, if it has one already."""
        return await rollouts.complete(ref, wanted or shapes.CompleteTrajectory())

    @router.post("/abort_trajectory")
    async def abort_trajectory(ref: Ref, wanted: shapes.AbortTrajectory | None = None) -> shapes.TrajectoryEnded:
        """The rollout failed: its steps are dropped, its place in the group is free again."""
        reason = wanted.reason if wanted else ""
        await recorder.settle(ref.trajectory_uid)
        ending = await pool.abort_trajectory(ref.trajectory_uid, ref.prompt_uid)
        known.forget(ref.trajectory_uid)
        log.info("trajectory %s was aborted: %s", ref.trajectory_uid, reason or "no reason given")
        return shapes.TrajectoryEnded(status=ending)

    @router.post("/feedback")
    async def feedback(ref: Ref, given: shapes.Feedback) -> shapes.FeedbackGiven:
        """Score a trajectory or one of its steps, or score it anew, now or long after its end."""
        await recorder.settle(ref.trajectory_uid)
        reward = RewardGiven(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            value=given.value,
            source=given.source,
            step_index=given.step_index,
            notes=given.note,
        )
        return shapes.FeedbackGiven(status="counted" if await pool.give_reward(reward) else "late")

    @router.get("/models")
    async def models(ref: Ref) -> Response:
        """The engines' models."""
        status, body = await engines.models()
        return relayed(status, body)

    return router
