"""Readings of the gateways: their metrics, readiness and engines, polled every few seconds and kept for an hour.

A gateway that does not answer is shown as such and does not delay the others.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from stepwell.common.async_calls import RepeatedWork, repeating

INTERVAL = 5.0
TIMEOUT = 3.0
READINGS_KEPT = 720
"""An hour."""
READINGS_PER_MINUTE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayNow:
    url: str
    ready: bool = False
    missing: Sequence[str] = ()
    in_flight: int = 0
    waiting_steps: int = 0
    calls: int = 0
    """The calls since the gateway was started."""
    p50: float | None = None
    """The median duration of the last minute's calls, in seconds."""
    p95: float | None = None
    lost: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    """Why there is no reading."""


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Durations of calls. A gateway's histogram only grows; the difference of two readings is an interval's."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, the last infinite."""
    counts: tuple[float, ...]
    """Calls in each bucket, not cumulative."""

    @property
    def total(self) -> float:
        return sum(self.counts)

    def since(self, before: "LatencyHistogram | None") -> "LatencyHistogram":
        """The calls added since then. A restarted process counts from 0: then all calls are new."""
        if before is None or before.bounds != self.bounds:
            return self
        added = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return self if min(added, default=0) < 0 else LatencyHistogram(self.bounds, added)

    def percentile(self, share: float) -> float | None:
        """Interpolated within a bucket. None without calls; the last finite bound if it lies beyond that."""
        wanted, below, lower = share * self.total, 0.0, 0.0
        for upper, count in zip(self.bounds, self.counts, strict=True):
            if count and below + count >= wanted:
                return lower if upper == float("inf") else lower + (upper - lower) * (wanted - below) / count
            below, lower = below + count, upper
        return None


def from_cumulative(buckets: dict[float, float]) -> LatencyHistogram:
    """Converts Prometheus' form, in which each bucket also counts all lower ones."""
    bounds = tuple(sorted(buckets))
    sums = [0.0, *(buckets[bound] for bound in bounds)]
    return LatencyHistogram(bounds, tuple(after - before for before, after in pairwise(sums)))


def merge_histograms(parts: Sequence[LatencyHistogram]) -> LatencyHistogram:
    if not parts:
        return LatencyHistogram((), ())
    same = [part for part in parts if part.bounds == parts[-1].bounds]
    return LatencyHistogram(parts[-1].bounds, tuple(map(sum, zip(*(part.counts for part in same), strict=True))))


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """The figures that are read from a gateway's /metrics."""

    in_flight: int
    waiting_steps: int
    lost: Mapping[str, int]
    calls: LatencyHistogram


class GatewayMonitor:
    def __init__(
        self, urls: Sequence[str], key: str | None, *, interval: float = INTERVAL, timeout: float = TIMEOUT
    ) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = timeout
        self.watched = [WatchedGateway(url, interval, timeout) for url in urls]
        self._polls: list[RepeatedWork] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            self._polls = [partial(watched.poll, session) for watched in self.watched]
            async with repeating(*self._polls):
                yield

    async def poll(self) -> None:
        """Read all gateways now."""
        await asyncio.gather(*(poll() for poll in self._polls))

    def engines(self) -> list[Mapping[str, Any]]:
        return [engine for watched in self.watched for engine in watched.engines]


class WatchedGateway:
    def __init__(self, url: str, interval: float, timeout: float) -> None:
        self.url = url
        self.now = GatewayNow(url=url, error="no reading yet")
        self.engines: Sequence[Mapping[str, Any]] = ()
        self._interval, self._timeout = interval, timeout
        self._last: LatencyHistogram | None = None
        self._intervals: deque[tuple[float, LatencyHistogram]] = deque(maxlen=READINGS_KEPT)
        self._polling = asyncio.Lock()

    async def poll(self, session: aiohttp.ClientSession) -> float:
        async with self._polling:  # intervals are differences of readings, so these must not overlap
            await self._poll(session)
        return self._interval

    async def _poll(self, session: aiohttp.ClientSession) -> None:
        paths = ("/metrics", "/ready", "/engines")
        try:
            metrics, ready, engines = await asyncio.gather(*(_get(session, self.url + path) for path in paths))
            self._record(read_metrics(metrics.decode()), orjson.loads(ready), orjson.loads(engines))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as failure:
            self.now = GatewayNow(url=self.url, error=_explain(failure, self._timeout))
            self.engines = ()

    def series(self, since: float) -> dict[str, list[float | None]]:
        intervals = [(end, calls) for end, calls in self._intervals if end > since]
        return {
            "ends": [end for end, _ in intervals],
            "calls": [int(calls.total) for _, calls in intervals],
            "p50": [calls.percentile(0.5) for _, calls in intervals],
            "p95": [calls.percentile(0.95) for _, calls in intervals],
        }

    def _record(self, reading: GatewayReading, ready: Mapping[str, Any], engines: Mapping[str, Any]) -> None:
        if self._last is not None:
            self._intervals.append((time.time(), reading.calls.since(self._last)))
        self._last = reading.calls
        last_minute = merge_histograms([calls for _, calls in list(self._intervals)[-READINGS_PER_MINUTE:]])
        self.now = GatewayNow(
            url=self.url,
            ready=ready["ready"],
            missing=[f"{name}: {why}" for name, why in ready["missing"].items()],
            in_flight=reading.in_flight,
            waiting_steps=reading.waiting_steps,
            calls=int(reading.calls.total),
            p50=last_minute.percentile(0.5),
            p95=last_minute.percentile(0.95),
            lost=reading.lost,
        )
        self.engines = [{**engine, "gateway": self.url} for engine in engines["engines"]]


def read_metrics(text: str) -> GatewayReading:
    values: dict[str, float] = {}
    lost: dict[str, int] = {}
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "stepwell_call_seconds_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name == "stepwell_lost_steps_total":
                lost[sample.labels["cause"]] = int(sample.value)
            elif not sample.labels:
                values[sample.name] = sample.value
    waiting = int(values.get("stepwell_waiting_steps", 0))
    return GatewayReading(int(values.get("stepwell_in_flight", 0)), waiting, lost, from_cumulative(buckets))


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url) as response:
        if response.status not in (200, 503):  # a gateway that is not ready answers 503
            response.raise_for_status()
        return await response.read()


def _explain(failure: Exception, timeout: float) -> str:
    if isinstance(failure, aiohttp.ClientResponseError) and failure.status in (401, 403):
        return "the gateway does not accept this dashboard's key; give both the same control key"
    if isinstance(failure, TimeoutError):
        return f"it did not answer within {timeout:g} s"
    if isinstance(failure, aiohttp.ClientError):
        return f"it cannot be reached: {failure}"
    return f"it is not a gateway: {failure!r}"
