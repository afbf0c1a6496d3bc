"""Black-box agents: they know a base_url, speak OpenAI's chat API, and never notice that they are recorded.

The trajectory is named by the URL, its state lives in the pool's shard: any gateway serves any call.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from stepwell.core.intake import TRAIN, Registration
from stepwell.core.ports import PoolPort
from stepwell.errors import BadRequest, UnknownTrajectory
from stepwell.gateway.answers import relayed
from stepwell.gateway.engine import Engines
from stepwell.gateway.recorder import Recorder
from stepwell.wire import gateway as shapes
from stepwell.wire.chat import read_call, read_reply
from stepwell.wire.recorded import CallContext, recorded_steps

log = logging.getLogger("stepwell.gateway")

NO_KEY = "not-needed"
KNOWN_KEPT = 100_000


@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """A trajectory as its URL names it."""

    trajectory_uid: Annotated[shapes.Uid, Path()]
    prompt_uid: Annotated[shapes.Uid, Path()]


Ref = Annotated[TrajectoryRef, Depends()]


class KnownTrajectories:
    """Which trajectories the pool has confirmed. Losing it costs a question each, nothing else."""

    def __init__(self, pool: PoolPort) -> None:
        self._pool = pool
        self._known: OrderedDict[str, str] = OrderedDict()

    def add(self, ref: TrajectoryRef) -> None:
        self._known[ref.trajectory_uid] = ref.prompt_uid
        if len(self._known) > KNOWN_KEPT:
            self._known.popitem(last=False)

    def forget(self, trajectory_uid: str) -> None:
        self._known.pop(trajectory_uid, None)

    async def require(self, ref: TrajectoryRef) -> None:
        """Refuse a call before it costs the engine anything, if its step would have no place to go."""
        if self._known.get(ref.trajectory_uid) == ref.prompt_uid:
            return
        if not await self._pool.knows(ref.trajectory_uid, ref.prompt_uid):
            raise UnknownTrajectory(
                f"no open trajectory {ref.trajectory_uid} of prompt_uid {ref.prompt_uid}; take a base_url from "
                "POST /init_trajectory"
            )
        self.add(ref)


def opening_router(pool: PoolPort, known: KnownTrajectories) -> APIRouter:
    """How a trajectory gets its base_url, and what those are told who have none."""
    router = APIRouter()

    @router.post("/init_trajectory")
    async def init_trajectory(request: Request, wanted: shapes.InitTrajectory | None = None) -> shapes.TrajectoryOpened:
        wanted = wanted or shapes.InitTrajectory()
        ref = TrajectoryRef(wanted.trajectory_uid or uuid4().hex, wanted.prompt_uid or uuid4().hex)
        await pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, wanted.group_size, wanted.metadata)
        )
        known.add(ref)
        return shapes.TrajectoryOpened(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            base_url=f"{request.base_url}{ref.trajectory_uid}/{ref.prompt_uid}",
            api_key=NO_KEY,
        )

    @router.get("/pacing")
    async def pacing(channel: Annotated[shapes.ChannelName, Query()] = TRAIN) -> shapes.PacingNow:
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
    pool: PoolPort,
    engines: Engines,
    recorder: Recorder,
    known: KnownTrajectories,
    *,
    prompt_length: int,
    response_length: int,
) -> APIRouter:
    """What stands below a trajectory's base_url."""
    router = APIRouter()

    @router.post("/chat/completions")
    async def chat_completions(request: Request, ref: Ref) -> Response:
        call = read_call(await request.body(), response_length=response_length)
        await known.require(ref)
        context = CallContext(
            ref.trajectory_uid, ref.prompt_uid, pool.policy_version, time.time(), call.sampling, prompt_length
        )
        answer = await engines.chat(call.body)
        if answer.status != 200:
            return relayed(answer.status, answer.body)
        reply = read_reply(answer.body, call)
        await recorder.record(recorded_steps(context, reply.choices, reply.usage))
        return Response(reply.body, media_type="application/json")

    @router.post("/register_trajectory")
    async def register_trajectory(ref: Ref, wanted: shapes.RegisterTrajectory) -> shapes.Registered:
        await pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, metadata=wanted.metadata)
        )
        known.add(ref)
        return shapes.Registered()

    @router.post("/complete_trajectory")
    async def complete_trajectory(ref: Ref, wanted: shapes.CompleteTrajectory | None = None) -> shapes.TrajectoryEnded:
        wanted = wanted or shapes.CompleteTrajectory()
        await recorder.settle()
        if wanted.channel is not None:
            await pool.register_trajectory(Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel))
        ending = await pool.complete_trajectory(ref.trajectory_uid, ref.prompt_uid, wanted.reward)
        known.forget(ref.trajectory_uid)
        return shapes.TrajectoryEnded(status=ending)

    @router.post("/abort_trajectory")
    async def abort_trajectory(ref: Ref, wanted: shapes.AbortTrajectory | None = None) -> shapes.TrajectoryEnded:
        reason = wanted.reason if wanted else ""
        await recorder.settle()
        ending = await pool.abort_trajectory(ref.trajectory_uid, ref.prompt_uid)
        known.forget(ref.trajectory_uid)
        log.info("trajectory %s was aborted: %s", ref.trajectory_uid, reason or "no reason given")
        return shapes.TrajectoryEnded(status=ending)

    @router.get("/models")
    async def models(ref: Ref) -> Response:
        answer = await engines.models()
        return relayed(answer.status, answer.body)

    return router
