"""How many samples a worker holds: those it can work on at once, and about a second's worth more.

More would keep them from other workers, and let their lease run out here if the function became slow; fewer would let
the children wait while the pool is asked.
"""

MOST_HELD = 2_048
SECOND = 1.0


class Pace:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held = 0
        self._since = 0.0
        self._finished = 0
        self._last_second = 0.0

    def room(self) -> int:
        """How many to take now; 0 while it would not be worth a message."""
        target = min(MOST_HELD, self._slots + int(max(self._finished, self._last_second)))
        room = target - self._held
        return room if 2 * room >= target else 0

    def take(self, count: int) -> None:
        self._held += count

    def finish(self, count: int, now: float) -> None:
        self._held -= count
        self._finished += count
        if now - self._since >= SECOND:
            self._last_second = self._finished * SECOND / (now - self._since)
            self._since, self._finished = now, 0
