"""How long calls take, from a histogram that only ever grows: what an interval added, and its percentiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Histogram:
    bounds: tuple[float, ...]
    """Upper bounds of the buckets, the last infinite."""
    counts: tuple[float, ...]
    """In each bucket, not added up."""

    @property
    def total(self) -> float:
        return sum(self.counts)

    def since(self, before: "Histogram | None") -> "Histogram":
        """What was added. A process that was restarted counts from 0: then all of it is new."""
        if before is None or before.bounds != self.bounds:
            return self
        added = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return self if min(added, default=0) < 0 else Histogram(self.bounds, added)

    def percentile(self, share: float) -> float | None:
        """As if a bucket's calls were spread evenly over it; None without calls, the last bound where it is beyond."""
        wanted, below, lower = share * self.total, 0.0, 0.0
        for upper, count in zip(self.bounds, self.counts, strict=True):
            if count and below + count >= wanted:
                return lower if upper == float("inf") else lower + (upper - lower) * (wanted - below) / count
            below, lower = below + count, upper
        return None


def cumulated(buckets: dict[float, float]) -> Histogram:
    """From Prometheus's form, in which each bucket counts all below it as well."""
    bounds = tuple(sorted(buckets))
    sums = [0.0, *(buckets[bound] for bound in bounds)]
    return Histogram(bounds, tuple(after - before for before, after in pairwise(sums)))


def together(parts: Sequence[Histogram]) -> Histogram:
    if not parts:
        return Histogram((), ())
    same = [part for part in parts if part.bounds == parts[-1].bounds]
    return Histogram(parts[-1].bounds, tuple(map(sum, zip(*(part.counts for part in same), strict=True))))
