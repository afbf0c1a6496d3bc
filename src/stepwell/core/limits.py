"""The bounds a pool keeps to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_queue_size: int = 10_000
    """Groups held per channel; when one more arrives, the oldest is dropped, and counted."""
    group_size: int = 1
    """Trajectories in a group, where whoever registers the first of them does not say."""
    max_channels: int = 64
    closed_kept: int = 100_000
    """How many closed trajectories are remembered, so that a late step is told apart from an unknown one."""
    quarantine_kept: int = 256
    """How many quarantined steps are kept for inspection. All are counted."""
