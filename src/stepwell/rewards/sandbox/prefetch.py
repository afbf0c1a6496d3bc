"""How many samples a child may hold: several if calls are fast, one if they are not; of an async function, a number."""

LOOKAHEAD = 0.005
"""Seconds' worth of fast calls that a child is given at once."""
MOST_AT_ONCE = 64


class Window:
    """The children of one function share it, so that a new one need not learn anew."""

    def __init__(self, calls_at_once: int | None = None) -> None:
        """An async function has its `calls_at_once`; a plain one (None) as many as it is fast."""
        self.size = calls_at_once or 1
        self.is_async = calls_at_once is not None

    @property
    def is_fast(self) -> bool:
        """Of a plain function: whether calls take so little that a child holds several."""
        return not self.is_async and self.size > 1

    def learn(self, seconds: float) -> None:
        """From a call that took so long."""
        if not self.is_async:
            self.size = max(1, min(self.size * 2, MOST_AT_ONCE, int(LOOKAHEAD / max(seconds, 1e-6))))
