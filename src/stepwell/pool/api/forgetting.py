"""The right to be forgotten: what a shard answers when a subject's data is to be removed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from stepwell.common.message_format import message


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """What one shard removed of a subject so far."""

    shard: str
    subject: str
    """A keyed hash of the subject. All shards of a pool have the same. `age` for what was too old."""
    asked_at: float
    """When it was first asked for, in seconds of the wall clock."""
    is_done: bool
    """False: the shard goes on by itself, also after a restart."""
    removed: Mapping[str, Any] = field(default_factory=dict)
    """In plain values. `trajectories`: by keyed hash of their uid, where each was, its steps and tokens, and a hash of
    its token ids. `files`: by name, the rows removed and the SHA-256 before and after. Counts of `late_rewards`,
    `audit_entries` and `quarantined`. `set_aside`: damaged journals that were deleted. `gateways` and
    `silent_gateways`: whose spools were cleaned, and who did not answer. `versions`: trained on it."""
    names: Sequence[str] = ()
    """Keyed hashes of the names of its trajectories and sessions, for the other shards."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenSubject:
    """A tombstone, for a shard that joins the pool."""

    subject: str
    asked_at: float


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """What a shard keeps though it is too old by the wall clock: the pool has not run for as long since it came. The
    pool was off, or the clock is wrong."""

    shard: str = ""
    clock: float = 0.0
    """The shard's wall clock, in seconds."""
    trajectories: int = 0
    """In the pool."""
    archived: int = 0
    """In the archive."""
    since: float = inf
    """When the oldest of them began, in seconds of the wall clock."""

    @property
    def count(self) -> int:
        return self.trajectories + self.archived


def merge_receipts(receipts: Sequence[ShardReceipt], written_at: float) -> dict[str, Any]:
    """The receipt of a pool, in plain values. `written_at` is in seconds of the wall clock."""
    versions = {version for receipt in receipts for version in receipt.removed.get("versions", ())}
    return {
        "subject": receipts[0].subject,
        "older_than": receipts[0].removed.get("older_than"),
        "asked_at": min(receipt.asked_at for receipt in receipts),
        "written_at": written_at,
        "trained_versions": sorted(versions),
        "shards": {receipt.shard: dict(receipt.removed) for receipt in receipts},
    }
