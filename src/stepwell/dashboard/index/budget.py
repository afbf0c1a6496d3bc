"""How much of the pool's time one watcher takes. Pure: whoever spends says what time it is."""

from collections import deque

CALLS_KEPT = 32


class Budget:
    """A share of every second, saved up to a reserve.

    What always holds: over any long time no more than that share is spent; the reserve pays for a first reading of
    everything, and for bursts. What a call costs the pool is told from the quickest of the last calls: what another was
    waited for longer, the pool was away, or the machine was busy with others.
    """

    def __init__(self, share: float, reserve: float) -> None:
        self._share = share
        self._reserve = reserve
        self._credit = reserve
        self._at: float | None = None
        self._rates: deque[float] = deque(maxlen=CALLS_KEPT)

    def spend(self, waited: float, amount: int, now: float) -> None:
        """A call for so much was waited for so many seconds."""
        self._save(now)
        self._rates.append(waited / amount)
        self._credit -= min(self._rates) * amount

    def rest(self, now: float) -> float:
        """Seconds until something may be spent again."""
        self._save(now)
        return max(0.0, -self._credit / self._share)

    def _save(self, now: float) -> None:
        if self._at is not None:
            self._credit = min(self._reserve, self._credit + self._share * (now - self._at))
        self._at = now
