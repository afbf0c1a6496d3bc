"""The free space below which a shard takes no new data: leases, rewards and completions can still be written."""

import logging
from collections.abc import Callable

log = logging.getLogger("stepwell.pool")

MIB = 2**20


class DiskFloor:
    def __init__(self, min_free: int, free_bytes: Callable[[], float], *, shard: str, place: str) -> None:
        """`place` is what is nearly full."""
        self._min_free = min_free
        self._free_bytes = free_bytes
        self._shard = shard
        self._place = place
        self._said = False

    def shortage(self) -> str | None:
        """Why no new data is taken, and what to do; None if there is room. The log has it once."""
        free = self._free_bytes()
        if free >= self._min_free:
            self._said = False
            return None
        text = (
            f"shard {self._shard} takes no new data: the disk of {self._place} has {free / MIB:.1f} MiB free, and "
            f"--min-free-bytes is {self._min_free / MIB:g} MiB. Free some space there, or let trainers take what the "
            "pool holds; steps wait in the gateways meanwhile"
        )
        if not self._said:
            self._said = True
            log.error("%s", text)
        return text
