"""How a black-box rollout begins and ends.

The trajectory is named by the URL, its state lives in the pool's shard: any gateway serves any call.
"""

from uuid import uuid4

from stepwell.common.access_keys import AccessKeys
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import Registration, TrajectoryRef
from stepwell.wire import gateway_api as shapes


class TrajectoryLifecycle:
    def __init__(self, pool: StepSink, recorder: Outbox, known: KnownTrajectories, keys: AccessKeys) -> None:
        self._pool = pool
        self._recorder = recorder
        self._known = known
        self._keys = keys

    async def open(self, wanted: shapes.InitTrajectory, root: str) -> shapes.TrajectoryOpened:
        """`root` is the gateway's own address, as the caller knows it, with a slash at its end."""
        ref = TrajectoryRef(wanted.trajectory_uid or uuid4().hex, wanted.prompt_uid or uuid4().hex)
        await self._pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, wanted.group_size, wanted.metadata)
        )
        self._known.add(ref)
        return shapes.TrajectoryOpened(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            base_url=f"{root}{ref.trajectory_uid}/{ref.prompt_uid}",
            api_key=self._keys.trajectory_key(ref.trajectory_uid, ref.prompt_uid),
        )

    async def complete(self, ref: TrajectoryRef, wanted: shapes.CompleteTrajectory) -> shapes.TrajectoryEnded:
        await self._recorder.settle(ref.trajectory_uid)
        if wanted.channel is not None:
            await self._pool.register_trajectory(Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel))
        ending = await self._pool.complete_trajectory(ref.trajectory_uid, ref.prompt_uid, wanted.reward)
        self._known.forget(ref.trajectory_uid)
        return shapes.TrajectoryEnded(status=ending)
