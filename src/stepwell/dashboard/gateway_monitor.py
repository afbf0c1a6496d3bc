"""What the gateways show of themselves, asked every few seconds; an hour of it is kept.

What always holds: a gateway that is down is shown as such, and holds up nothing else.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from stepwell.common.async_calls import RepeatedWork, repeating
from stepwell.dashboard.latency import Histogram, cumulated, together

INTERVAL = 5.0
TIMEOUT = 3.0
KEPT = 720
"""An hour."""
A_MINUTE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayNow:
    url: str
    ready: bool = False
    missing: Sequence[str] = ()
    in_flight: int = 0
    waiting_steps: int = 0
    calls: int = 0
    """Since it was started."""
    p50: float | None = None
    """Seconds that half of the last minute's calls took at most."""
    p95: float | None = None
    lost: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    """Why nothing is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNow:
    address: str
    state: str
    why: str
    in_flight: int
    weight_version: str | None
    server: str
    gateway: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySeries:
    ends: Sequence[float]
    calls: Sequence[int]
    p50: Sequence[float | None]
    p95: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Metrics:
    """What is read from /metrics."""

    in_flight: int
    waiting_steps: int
    lost: Mapping[str, int]
    calls: Histogram


class Gateways:
    def __init__(self, urls: Sequence[str], key: str | None) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.watched = [Watched(url) for url in urls]
        self._looks: list[RepeatedWork] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            self._looks = [partial(watched.look, session) for watched in self.watched]
            async with repeating(*self._looks):
                yield

    async def look(self) -> None:
        """Ask them all now."""
        await asyncio.gather(*(look() for look in self._looks))

    def engines(self) -> list[EngineNow]:
        return [engine for watched in self.watched for engine in watched.engines]


class Watched:
    """One gateway."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.now = GatewayNow(url=url, error="not asked yet")
        self.engines: Sequence[EngineNow] = ()
        self._before: Histogram | None = None
        self._added: deque[tuple[float, Histogram]] = deque(maxlen=KEPT)
        self._looking = asyncio.Lock()

    async def look(self, session: aiohttp.ClientSession) -> float:
        async with self._looking:  # counts are differences: one look after the other
            await self._look(session)
        return INTERVAL

    async def _look(self, session: aiohttp.ClientSession) -> None:
        paths = ("/metrics", "/ready", "/engines")
        try:
            metrics, ready, engines = await asyncio.gather(*(_get(session, self.url + path) for path in paths))
            self._take(read_metrics(metrics.decode()), orjson.loads(ready), orjson.loads(engines))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as failure:
            self.now = GatewayNow(url=self.url, error=_explained(failure))
            self.engines = ()

    def series(self, since: float) -> LatencySeries:
        found = [(end, calls) for end, calls in self._added if end > since]
        return LatencySeries(
            ends=[end for end, _ in found],
            calls=[int(calls.total) for _, calls in found],
            p50=[calls.percentile(0.5) for _, calls in found],
            p95=[calls.percentile(0.95) for _, calls in found],
        )

    def _take(self, metrics: Metrics, ready: Mapping[str, Any], engines: Mapping[str, Any]) -> None:
        if self._before is not None:
            self._added.append((time.time(), metrics.calls.since(self._before)))
        self._before = metrics.calls
        last = together([calls for _, calls in list(self._added)[-A_MINUTE:]])
        self.now = GatewayNow(
            url=self.url,
            ready=ready["ready"],
            missing=[f"{name}: {why}" for name, why in ready["missing"].items()],
            in_flight=metrics.in_flight,
            waiting_steps=metrics.waiting_steps,
            calls=int(metrics.calls.total),
            p50=last.percentile(0.5),
            p95=last.percentile(0.95),
            lost=metrics.lost,
        )
        self.engines = [_engine(engine, self.url) for engine in engines["engines"]]


def read_metrics(text: str) -> Metrics:
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
    return Metrics(int(values.get("stepwell_in_flight", 0)), waiting, lost, cumulated(buckets))


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url) as answer:
        if answer.status not in (200, 503):  # a gateway that is not ready says so with a 503
            answer.raise_for_status()
        return await answer.read()


def _engine(told: Mapping[str, Any], gateway: str) -> EngineNow:
    return EngineNow(
        address=told["address"],
        state=told["state"],
        why=told["why"],
        in_flight=told["in_flight"],
        weight_version=told["weight_version"],
        server=told["server"],
        gateway=gateway,
    )


def _explained(failure: Exception) -> str:
    if isinstance(failure, aiohttp.ClientResponseError) and failure.status in (401, 403):
        return "the gateway does not accept this dashboard's key; give both the same control key"
    if isinstance(failure, TimeoutError):
        return f"it did not answer within {TIMEOUT:g} s"
    if isinstance(failure, aiohttp.ClientError):
        return f"it cannot be reached: {failure}"
    return f"this is no gateway: {failure!r}"
