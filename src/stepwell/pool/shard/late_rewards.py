"""Rewards that come when their trajectory is already shipped or dropped: a thumb up, days after the conversation.

They change nothing in the pool. They are rows of their own beside the archived groups, which are not written again. A
reader of the archive takes, of all rewards of a trajectory or step, the one with the highest revision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.pool.api.producing import RewardGiven

if TYPE_CHECKING:
    import pyarrow

FOLDER = "_rewards"
"""A folder of the archive. Parquet readers skip names that begin with an underscore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateReward(RewardGiven):
    revision: int
    """Higher than that of every earlier reward of the trajectory and its steps."""
    at: float
    """Wall-clock seconds."""


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
