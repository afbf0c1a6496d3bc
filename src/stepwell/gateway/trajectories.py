"""Which trajectories there are, as far as this gateway has asked. Losing it costs a question each, nothing else."""

from collections import OrderedDict

from stepwell.errors import UnknownTrajectory
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import TrajectoryRef

KEPT = 100_000


class KnownTrajectories:
    def __init__(self, pool: StepSink) -> None:
        self._pool = pool
        self._known: OrderedDict[str, str] = OrderedDict()

    def add(self, ref: TrajectoryRef) -> None:
        self._known[ref.trajectory_uid] = ref.prompt_uid
        if len(self._known) > KEPT:
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
