"""Stored groups for tests, and a pool that shows what it was given."""

from collections.abc import Mapping, Sequence
from typing import Any

from rig.builders import make_step
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.watching import Changes, Cursor, TrajectorySnapshot, TrajectoryState
from stepwell.pool.client import PoolClient
from stepwell.pool.client.in_process import InProcessTransport
from stepwell.steps.columns import Columns, pack
from stepwell.steps.groups import StepGroup
from stepwell.steps.step import Step


def turns(uid: str, count: int = 1, prompt_uid: str = "p", **fields: Any) -> list[Step]:
    return [
        make_step(uid, prompt_uid, step_index=turn, uid=f"{uid}-{turn}", is_last=turn == count - 1, **fields)
        for turn in range(count)
    ]


def stored(*trajectories: list[Step], source: str = "", channel: str = "train") -> StepGroup:
    return StepGroup(pack([step for steps in trajectories for step in steps]), source, channel)


def summary(uid: str, prompt_uid: str = "p", **fields: Any) -> TrajectorySnapshot:
    common: dict[str, Any] = {"channel": "train", "source": "", "shard": "s", "group": 1, "group_size": 1}
    common |= {"state": TrajectoryState.READY, "steps": 1, "tokens": 4}
    return TrajectorySnapshot(trajectory_uid=uid, prompt_uid=prompt_uid, **{**common, **fields})


class ShownPool(PoolClient):
    """No shard is behind it. Tells of changes in the pages it was given, and holds the steps it was given."""

    def __init__(self, pages: Sequence[Sequence[TrajectorySnapshot]], steps: Sequence[Step]) -> None:
        super().__init__("data_pool", transport=InProcessTransport({}))
        self._pages, self._steps = pages, steps
        self.anew: Mapping[int, Sequence[str]] = {}
        """By page: which shards begin anew with it."""
        self.asked: list[list[str]] = []
        self.away = 0
        """How many reads still to fail."""

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        page = cursors["s"].position if cursors else 0
        return Changes(
            snapshots=self._pages[page],
            cursors={"s": Cursor(epoch="e", position=page + 1)},
            reset_shards=self.anew.get(page, ()),
            more=page + 1 < len(self._pages),
        )

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        if self.away:
            self.away -= 1
            raise PoolUnavailable("the shard is restarting")
        self.asked.append([uid for uid, _ in uids])
        return pack(
            [s for uid, prompt in uids for s in self._steps if (s.trajectory_uid, s.prompt_uid) == (uid, prompt)]
        )
