"""What would be trained next: the batch that a trainer would get now, and the oldest groups that are not in it.

Looking leases, counts and drops nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.common.message_format import message
from stepwell.pool.api.leasing import BatchRequest, ExactFill, ReadySummary

PREVIEWED = 500
"""Groups, trajectories or steps of a batch that are described at most."""
WAITING = 20
"""Groups that are not in the batch and are described at most."""
LATER = "the batch is full: its turn comes later"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewItem:
    """A group, trajectory or step in the queue."""

    prompt_uid: str
    group: int
    """The group's seq in its shard."""
    age: int
    opened_at: float
    source: str
    user: str
    size: int
    """Rollouts that the group is to have."""
    trajectories: tuple[str, ...]
    """The uids of those that the trainer would get; of a waiting group, of all that it has."""
    rewards: tuple[float | None, ...]
    """Of each of them: its return."""
    steps: int
    """The steps that the trainer would get; of a waiting group, all that are held."""
    oldest_version: int | None
    behind: int
    """How many policy versions its oldest token is behind."""
    from_history: bool = False
    why: str = ""
    """Why it is not in the batch."""
    shard: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPreview:
    request: BatchRequest | ExactFill
    asked_at: float
    """When a consumer asked for such a batch last; 0 if none has since the shard started."""
    items: Sequence[PreviewItem]
    """What the shard would hand out, oldest first. For an exact fill, what it would offer."""
    count: int
    """How many that are, also those that are not described."""
    ready: ReadySummary
    """All of them that are not from history."""
    waiting: Sequence[PreviewItem]
    """The oldest groups of which nothing is among the items."""
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPreview:
    request: BatchRequest | ExactFill
    asked_at: float
    items: Sequence[PreviewItem]
    """The batch, or as much of it as there is; not all of a large one."""
    is_complete: bool
    """Would a fetch return at once?"""
    waiting: Sequence[PreviewItem]
    """The oldest groups that are not in the batch."""
    waits_for: str
    """What a fetch would wait for; empty if it would return at once."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer."""
