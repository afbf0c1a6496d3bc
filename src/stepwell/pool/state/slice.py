"""A slice: what one feature adds to the state of a pool.

- Its state has rows in the journal, each under a key of the slice. An operation's rows are written in one transaction
  with everything else that it changes.
- The rules ask slices which groups they keep, snapshots ask what there is to say, shards hand their rows over.
- Its operations have the shard, and give it what it needs. Only one that works by itself keeps the shard.

`SLICES` of pool/slices/all.py has all of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.records import Group, Trajectory


class Slice:
    """The state of one feature in one shard. What it does not override has no effect."""

    name: ClassVar[str]
    """The name that its rows have in journals. It never changes."""

    def __init__(self, journal: StateJournal) -> None:
        self._journal = journal

    def dump(self) -> Mapping[str, Any]:
        """The state as rows: JSON by key, the oldest first."""
        return {}

    def load(self, rows: Mapping[str, Any]) -> None:
        """Take over all rows of a journal, the oldest first. The state is empty before."""

    def attach(self, shard: Any) -> None:
        """The shard is made, with this slice in its state. A slice that works by itself takes from the `Shard` of
        pool/shard/shard.py, which this package does not know, what it needs for that."""

    def keeps(self, group: Group) -> str:
        """Why the group is neither evicted nor stale, in a few words; empty if this slice does not keep it."""
        return ""

    def explain(self, trajectory: Trajectory) -> str:
        """A sentence for those who ask why a held trajectory is not trained; empty if there is nothing to say."""
        return ""

    def shared(self) -> Mapping[str, Any]:
        """The rows that the other shards need when their number changes: a later group of the same prompt may be
        theirs."""
        return {}

    def merge(self, rows: Mapping[str, Any]) -> None:
        """Take over what another shard shares. It may come again."""

    def remove(self, is_wanted: Callable[[str, str, float], bool]) -> int:
        """Remove the rows about trajectories that are removed for good: `is_wanted` is true for the uid, the prompt_uid
        and the time of such a row. Returns the number of removed rows."""
        return 0

    def _save(self, key: str, value: object) -> None:
        """A row in place of an earlier one with this key."""
        self._journal.save_row(self.name, key, value)

    def _remove(self, key: str) -> None:
        self._journal.remove_row(self.name, key)
