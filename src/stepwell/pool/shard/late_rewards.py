"""Rewards that came when their trajectory had been handed out or was gone: a thumb up, days after the conversation.

Nothing in the pool changes for them. They are rows of their own beside the archived groups, which are not written
again: whoever reads the archive takes, of a trajectory's or a step's rewards, the one with the highest revision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.pool.api.curation import BY_A_PERSON, Curation
from stepwell.pool.api.producing import RewardGiven

if TYPE_CHECKING:
    import pyarrow

FOLDER = "_rewards"
"""Within the archive. What begins with an underscore is no part of the data to Parquet's readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateReward:
    trajectory_uid: str
    prompt_uid: str
    step_index: int | None
    """None for the rollout's."""
    value: float
    source: str
    notes: str
    revision: int
    """Higher than that of every reward the trajectory and its steps had before."""
    at: float
    """Wall-clock seconds."""


def late(reward: RewardGiven, revision: int, at: float) -> LateReward:
    return LateReward(
        trajectory_uid=reward.trajectory_uid,
        prompt_uid=reward.prompt_uid,
        step_index=reward.step_index,
        value=reward.value,
        source=reward.source,
        notes=reward.notes,
        revision=revision,
        at=at,
    )


def as_reward(relabel: Curation) -> RewardGiven:
    """What a person gives to one that is gone."""
    assert relabel.reward is not None, "a relabel has a reward"
    return RewardGiven(
        trajectory_uid=relabel.trajectory_uid,
        prompt_uid=relabel.prompt_uid,
        value=relabel.reward,
        source=BY_A_PERSON + relabel.by,
        notes=relabel.why,
    )


def late_rewards_table(rewards: Sequence[LateReward]) -> "pyarrow.Table":
    import pyarrow as pa

    types = {
        "trajectory_uid": pa.string(),
        "prompt_uid": pa.string(),
        "step_index": pa.int32(),
        "value": pa.float64(),
        "source": pa.string(),
        "notes": pa.string(),
        "revision": pa.int32(),
        "at": pa.float64(),
    }
    return pa.table(
        {name: pa.array([getattr(reward, name) for reward in rewards], kind) for name, kind in types.items()}
    )
