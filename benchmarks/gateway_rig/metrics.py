"""A gateway's /metrics, as far as the benchmarks read it."""

import math
import re
import urllib.request
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.gateway_rig.processes import Server

LOOP_LAG = "stepwell_loop_lag_seconds"
BUCKET = re.compile(rf'^{LOOP_LAG}_bucket\{{le="([^"]+)"\}} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Histogram:
    counts: dict[float, float]
    """How many were at most so large."""

    def since(self, earlier: "Histogram") -> "Histogram":
        return Histogram({bound: count - earlier.counts[bound] for bound, count in self.counts.items()})

    def quantile(self, share: float) -> float:
        """Between two bounds, as if what lies between them were spread evenly; beyond the last, the last one."""
        last = max(bound for bound in self.counts if math.isfinite(bound))
        steps = [(0.0, 0.0), *((min(bound, last), count) for bound, count in sorted(self.counts.items()))]
        wanted = share * steps[-1][1]
        for (below, fewer), (bound, count) in pairwise(steps):
            if count >= wanted and count > fewer:
                return below + (bound - below) * (wanted - fewer) / (count - fewer)
        return 0.0


def loop_lag(server: Server, key: str) -> Histogram:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    counts = {float(bound): float(count) for bound, count in BUCKET.findall(text)}
    assert counts, f"/metrics has no {LOOP_LAG}"
    return Histogram(counts)
