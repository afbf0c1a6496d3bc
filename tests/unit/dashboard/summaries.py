from typing import Any

from stepwell.pool.api.watching import Changes, State, Summary


def make_summary(uid: str = "t", prompt: str = "p", **fields: Any) -> Summary:
    known: dict[str, Any] = {
        "channel": "train",
        "source": "",
        "shard": "pool",
        "group": 0,
        "group_size": 2,
        "state": State.READY,
        "steps": 1,
        "tokens": 10,
        "exactness": "engine",
    }
    return Summary(trajectory_uid=uid, prompt_uid=prompt, **{**known, **fields})


def told(*summaries: Summary, anew: tuple[str, ...] = ()) -> Changes:
    return Changes(summaries=summaries, cursors={}, anew=anew)
