from typing import Any

from stepwell.pool.api.watching import Changes, TrajectorySnapshot, TrajectoryState


def make_summary(uid: str = "t", prompt: str = "p", **fields: Any) -> TrajectorySnapshot:
    known: dict[str, Any] = {
        "channel": "train",
        "source": "",
        "shard": "pool",
        "group": 0,
        "group_size": 2,
        "state": TrajectoryState.READY,
        "steps": 1,
        "tokens": 10,
        "exactness": "engine",
    }
    return TrajectorySnapshot(trajectory_uid=uid, prompt_uid=prompt, **{**known, **fields})


def told(*summaries: TrajectorySnapshot, anew: tuple[str, ...] = ()) -> Changes:
    return Changes(snapshots=summaries, cursors={}, reset_shards=anew)
