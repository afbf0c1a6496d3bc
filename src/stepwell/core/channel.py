"""One channel's queue of groups: oldest first, bounded, never blocked by an unfinished group at its head."""

import heapq
from collections import OrderedDict

from stepwell.core.group import Group
from stepwell.core.stats import ChannelStats, Ledger


class Channel:
    """Groups by age. `ready` is a heap of the ready ones' seq; whatever leaves the queue leaves the heap with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = Ledger()
        self.trajectories = 0
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._joinable: dict[str, dict[int, Group]] = {}
        self._ready: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def ready(self) -> int:
        return len(self._ready)

    def joinable(self, prompt_uid: str) -> Group | None:
        """The oldest group of that prompt with room for one more trajectory."""
        groups = self._joinable.get(prompt_uid)
        return groups[min(groups)] if groups else None

    def oldest(self) -> Group | None:
        return next(iter(self._groups.values()), None)

    def oldest_unfinished(self) -> Group | None:
        return next((group for group in self._groups.values() if not group.is_ready()), None)

    def place(self, group: Group) -> None:
        """Note where `group` stands now, after it was opened or its trajectories changed."""
        self._groups[group.seq] = group
        if group.can_join():
            self._joinable.setdefault(group.prompt_uid, {})[group.seq] = group
        else:
            self._close_to_joining(group)
        if group.is_ready():
            heapq.heappush(self._ready, group.seq)

    def remove_oldest(self) -> Group:
        _, group = self._groups.popitem(last=False)
        self._close_to_joining(group)
        if group.is_ready():
            heapq.heappop(self._ready)  # the oldest of all is the oldest of the ready
        return group

    def remove_unfinished(self, group: Group) -> None:
        del self._groups[group.seq]
        self._close_to_joining(group)

    def take_ready(self) -> Group:
        """The oldest ready group; there must be one."""
        group = self._groups.pop(heapq.heappop(self._ready))
        self._close_to_joining(group)
        return group

    def stats(self) -> ChannelStats:
        return ChannelStats(
            groups=len(self._groups),
            ready_groups=self.ready,
            trajectories=self.trajectories,
            held=self.ledger.held(),
            accepted=self.ledger.accepted,
            shipped=self.ledger.shipped,
            dropped=self.ledger.dropped,
        )

    def _close_to_joining(self, group: Group) -> None:
        groups = self._joinable.get(group.prompt_uid)
        if groups is not None and groups.pop(group.seq, None) is not None and not groups:
            del self._joinable[group.prompt_uid]
