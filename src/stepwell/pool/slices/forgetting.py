"""Forgetting: everything of a subject, or everything that is too old, is removed from a pool for good.

- Here: what is asked of the shards, and their answers. A shard goes on by itself, also after a restart.
- removal.py: which data is removed, and its removal from the state of a shard.
- forgetting_work.py: the steps by which it leaves gateways, archive and journal, and what is removed by its age.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Self

from stepwell.common.message_format import message
from stepwell.errors import PoolUnavailable
from stepwell.pool.shard.operation import LongOperation
from stepwell.pool.state.tombstones import OLDER_THAN

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

FORGETTING = "forgetting"
"""The name of the slice in forgetting_work.py."""


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


def _slice_of(shard: "Shard") -> Any:
    """The `Forgetting` of the shard. A client does not load its module, which reads archives."""
    return next(part for part in shard.pool.state.slices if part.name == FORGETTING)


class _RemovesData(LongOperation[ShardReceipt]):
    """A shard that does not answer, or is not done, goes on by itself. Asked again, it has the receipt."""

    __slots__ = ()

    def again(self, parts: Sequence[ShardReceipt]) -> Self | None:
        if waiting := [receipt.shard for receipt in parts if not receipt.is_done]:
            raise PoolUnavailable(f"{', '.join(waiting)} will go on with it; ask again for the receipt")
        return None


@message
@dataclass(frozen=True, slots=True)
class Forget(_RemovesData):
    """Remove everything of a subject, for good."""

    subject: str
    also: Sequence[str] = ()
    """Hashes of names that other shards found: a late reward may be at another shard than its trajectory."""

    async def run(self, shard: "Shard") -> ShardReceipt:
        receipt: ShardReceipt = await _slice_of(shard).forget(self.subject, self.also)
        return receipt

    def again(self, parts: Sequence[ShardReceipt]) -> Self | None:
        found = {name for receipt in parts for name in receipt.names}
        if not all(found <= set(receipt.names) for receipt in parts):
            return replace(self, also=sorted(found))
        return _RemovesData.again(self, parts)


@message
@dataclass(frozen=True, slots=True)
class ForgetOverdue(_RemovesData):
    """Remove everything that is older than so many seconds by the wall clock, and what is older than its own retention.
    Each run has a receipt of its own."""

    seconds: float

    async def run(self, shard: "Shard") -> ShardReceipt:
        receipt: ShardReceipt = await _slice_of(shard).forget_overdue(self.seconds, by_clock=True)
        return receipt


@message
@dataclass(frozen=True, slots=True)
class FindOverdue(LongOperation[Overdue]):
    """What the retention keeps, though it is too old by the wall clock. What it need not keep is removed before."""

    async def run(self, shard: "Shard") -> Overdue:
        overdue: Overdue = await _slice_of(shard).enforce_retention()
        return overdue


@message
@dataclass(frozen=True, slots=True)
class ForgetKeptBack(_RemovesData):
    """Remove that too: a person says that the wall clock is right, and that the pool was off."""

    async def run(self, shard: "Shard") -> ShardReceipt:
        receipt: ShardReceipt = await _slice_of(shard).forget_kept_back()
        return receipt


def merge_receipts(receipts: Sequence[ShardReceipt], written_at: float) -> dict[str, Any]:
    """The receipt of a pool, in plain values. `written_at` is in seconds of the wall clock."""
    versions = {version for receipt in receipts for version in receipt.removed.get("versions", ())}
    return {
        "subject": receipts[0].subject,
        "older_than": receipts[0].removed.get(OLDER_THAN),
        "asked_at": min(receipt.asked_at for receipt in receipts),
        "written_at": written_at,
        "trained_versions": sorted(versions),
        "shards": {receipt.shard: dict(receipt.removed) for receipt in receipts},
    }
