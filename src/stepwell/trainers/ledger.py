"""What was trained: so that nothing is lost and nothing is trained twice, whenever the trainer dies.

What always holds: a lease stays open here until a checkpoint with its rollouts is on disk, and is acknowledged then. A
lease that ran out before comes back with the same rollouts, which are known by name and not trained again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from stepwell.trainers.ports import Leases

REMEMBERED = 10_000
"""Acknowledged rollouts that are still known by name: a pool that restarts may have missed an acknowledgement."""


class Ledger:
    def __init__(self, open_leases: Iterable[tuple[str, str]] = (), trained: Iterable[str] = ()) -> None:
        self._leases = [(str(shard), str(lease)) for shard, lease in open_leases]
        self._trained = OrderedDict.fromkeys(trained)

    def __contains__(self, trajectory_uid: object) -> bool:
        return trajectory_uid in self._trained

    @property
    def open_leases(self) -> Leases:
        return Leases(tuple(self._leases))

    @property
    def trained(self) -> list[str]:
        """The oldest first."""
        return list(self._trained)

    def enter(self, leases: Iterable[tuple[str, str]], trained: Sequence[str]) -> None:
        self._leases += leases
        self._trained.update(OrderedDict.fromkeys(trained))

    def close(self) -> None:
        """The open leases were acknowledged."""
        self._leases = []
        while len(self._trained) > REMEMBERED:
            self._trained.popitem(last=False)
