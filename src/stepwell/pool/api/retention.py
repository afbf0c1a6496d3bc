"""How long data is kept, and when it must be gone."""

from math import inf

from stepwell.steps.step import JsonObject

RETENTION = "retention_seconds"
"""In a trajectory's metadata: how many seconds its data is kept, if that is less than the pool keeps data."""


def due_at(born: float, metadata: JsonObject, retention: float | None) -> float:
    """When data that was born then must be gone, in seconds of the wall clock; infinite if never. `retention` is that
    of the pool, in seconds."""
    own = metadata.get(RETENTION)
    seconds = inf if retention is None else retention
    if isinstance(own, int | float) and not isinstance(own, bool):
        seconds = min(own, seconds)
    return born + seconds
