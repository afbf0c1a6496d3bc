"""Which pool and which of its shards a journal belongs to. A journal of another one is refused."""

from dataclasses import dataclass, replace
from uuid import uuid4


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalIdentity:
    pool: str
    """The name of the pool."""
    pool_uid: str
    """Made when the pool was created. Empty: that of the journal that is found, or a new one."""
    shards: int
    """How many the pool had when the journal was created."""
    index: int

    def complete(self) -> "JournalIdentity":
        return self if self.pool_uid else replace(self, pool_uid=uuid4().hex)

    def why_not(self, found: "JournalIdentity") -> str | None:
        """Why the journal that was found cannot be used, and what to do; None if it can."""
        if found.pool != self.pool:
            return f"belongs to pool {found.pool!r}, not to {self.pool!r}: use another --journal, or that --name"
        if self.pool_uid and found.pool_uid != self.pool_uid:
            return (
                f"belongs to another pool of the name {self.pool!r}, created at another time: put the right journal "
                "there, or use another --journal or --name"
            )
        if found.index != self.index:
            return f"is that of shard {found.index}, not of shard {self.index}: its file was renamed; name it as before"
        return None


def missing(name: str, restore: str) -> str:
    """`restore` says how the journal comes back."""
    return (
        f"journal {name} is missing or empty, and the shard had one: {restore}; steps wait in the gateways meanwhile. "
        "To give up what it held, end the pool and create it again with --new-journals"
    )
