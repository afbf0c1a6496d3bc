"""What the pool shows of itself to whoever watches: plain values, made to travel.

What always holds: looking changes nothing, and what it costs the pool does not grow with what is queued: a watcher asks
for what has changed since it last asked, and keeps its own list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a trajectory stands."""

    OPEN = "open"
    """Its rollout goes on."""
    WAITING = "waiting"
    """It is complete; its group is not ready. The cause says what is missing: rollouts, reward."""
    READY = "ready"
    LEASED = "leased"
    """A trainer has it and has not acknowledged it yet."""
    TRAINED = "trained"
    """Acknowledged; the cause names what the trainer's filter left out of it, if all of it was left out."""
    DROPPED = "dropped"
    """Never to be trained; the cause is the ledger's: evicted, aborted, empty, deadline, stale, reward_failed, cleared,
    rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One trajectory at a glance."""

    trajectory_uid: str
    prompt_uid: str
    channel: str
    source: str
    shard: str
    group: int
    """The group's seq in its shard."""
    group_size: int
    state: State
    cause: str = ""
    steps: int = 0
    """Quarantined ones included."""
    quarantined: int = 0
    untrainable: int = 0
    tokens: int = 0
    response_tokens: int = 0
    reward: float | None = None
    """The rollout's and its steps' own together, as a trainer that takes all of them gets them."""
    reward_source: str = ""
    oldest_version: int | None = None
    newest_version: int | None = None
    exactness: str = ""
    """The worst grade among its steps; empty without steps."""
    marks: tuple[str, ...] = ()
    started_at: float = 0.0
    """When its group was opened, by the pool's clock."""
    changed_at: float = 0.0
    note: str = ""
    """What belongs to the cause: how many versions behind it was, who rejected it and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a watcher has read in one shard. A shard that was restarted begins a new epoch, and is read anew."""

    epoch: str = ""
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Summaries of what has changed since the cursor asked with, oldest change first, each trajectory once."""

    summaries: Sequence[Summary]
    cursors: Mapping[str, Cursor]
    """By shard, to ask with next."""
    anew: Sequence[str] = ()
    """Shards that are read from their beginning: what the watcher knew of them is void."""
    more: bool = False
    """There is more right now: ask again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A channel's history, one value an interval, oldest first."""

    steps: Sequence[int]
    """Accepted in the interval."""
    tokens: Sequence[int]
    trained_steps: Sequence[int]
    """Acknowledged in the interval."""
    trained_tokens: Sequence[int]
    rewards: Sequence[int]
    """How many rollouts with a reward were acknowledged."""
    reward_mean: Sequence[float | None]
    reward_low: Sequence[float | None]
    """The 10th percentile, and the 90th; of several shards, their mean."""
    reward_high: Sequence[float | None]
    staleness: Sequence[Mapping[int, int]]
    """Of acknowledged rollouts, how many were so many versions behind when they were handed out."""
    groups: Sequence[int]
    """At the interval's end, as are the next two."""
    ready_groups: Sequence[int]
    oldest_age: Sequence[float]
    """Seconds since the oldest group held was opened; 0 without any."""
    dropped_tokens: Mapping[str, Sequence[int]]
    """By cause; and left out by a trainer's filter, as "left out: KIND"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    interval: float
    ends: Sequence[float]
    """Wall-clock seconds at which each interval ends; the last is still going."""
    channels: Mapping[str, Window]


class Action(StrEnum):
    MARK = "mark"
    UNMARK = "unmark"
    REJECT = "reject"
    RELABEL = "relabel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """What a person decides about one trajectory."""

    action: Action
    trajectory_uid: str
    prompt_uid: str
    by: str
    """Who."""
    why: str = ""
    mark: str = ""
    """For mark and unmark."""
    reward: float | None = None
    """For relabel."""


class Curated(StrEnum):
    """What became of it."""

    DONE = "done"
    UNCHANGED = "unchanged"
    """It was so already."""
    LATE = "late"
    """It was trained or dropped before: what was trained cannot be taken back. A relabelled reward goes to the archive
    if there is one."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One decision, as it was taken. Entries are only ever added."""

    at: float
    """Wall-clock seconds."""
    by: str
    action: Action
    trajectory_uid: str
    prompt_uid: str
    outcome: Curated
    before: str = ""
    """The reward, marks or state it had, in words."""
    after: str = ""
    why: str = ""
