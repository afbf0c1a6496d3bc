"""The bounds a pool keeps to, and what it does where one is reached. All hold per channel."""

from dataclasses import dataclass
from enum import StrEnum


class Overflow(StrEnum):
    """What happens when a channel is full."""

    DROP_OLDEST = "drop_oldest"
    REFUSE = "refuse"
    """New trajectories are refused; those under way are let finish."""


class OnDeadline(StrEnum):
    """What happens to a group that is not complete in time."""

    PARTIAL = "partial"
    """It is shipped with what is complete, if that is at least min_group_size; else dropped."""
    DROP = "drop"
    REFILL = "refill"
    """What is not complete is dropped, and producers are asked for as many rollouts again."""


class OnStale(StrEnum):
    """What happens to data whose oldest token is older than max_staleness allows, when it would be shipped."""

    DROP = "drop"
    KEEP = "keep"
    MASK = "mask"
    """It is shipped, with the tokens that are too old taken out of training."""


class OnRewardFailure(StrEnum):
    """What happens to a trajectory that could not be scored in as many attempts as it has."""

    DROP = "drop"
    """It leaves its group, and its place is free for another."""
    DROP_GROUP = "drop_group"
    KEEP = "keep"
    """It stays without a reward, until someone gives one or its group's deadline passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_queue_size: int = 10_000
    """Groups held. Those a trainer has under lease are the trainer's, and do not count."""
    max_bytes: int | None = None
    """Bytes of tokens and log-probabilities held, as stored."""
    overflow: Overflow = Overflow.DROP_OLDEST
    group_size: int = 1
    """Trajectories in a group, where whoever registers the first of them does not say."""
    group_deadline: float | None = None
    """Seconds a group may take from its first trajectory to its completion."""
    on_deadline: OnDeadline = OnDeadline.PARTIAL
    min_group_size: int = 1
    """The fewest complete trajectories that are shipped as a partial group."""
    max_staleness: int | None = None
    """How many policy versions the oldest token may be behind when it is shipped."""
    on_stale: OnStale = OnStale.DROP
    require_reward: bool = False
    """A group is ready only once each of its trajectories has a reward; those without are offered to reward workers."""
    reward_attempts: int = 3
    """How often reward workers may fail to score a trajectory."""
    on_reward_failure: OnRewardFailure = OnRewardFailure.DROP
    history_size: int = 0
    """Groups kept after they were trained, for batches that mix new and old."""
    batch_size: int | None = None
    """Trajectories one training step takes, for pacing; without it, what the last fetch took."""
    max_channels: int = 64
    closed_kept: int = 100_000
    """How many closed trajectories are remembered, so that a late step is told apart from an unknown one."""
    gone_kept: int = 20_000
    """How many of these are remembered with their summary, for whoever watches."""
    quarantine_kept: int = 256
    """How many quarantined steps are kept for inspection. All are counted."""
