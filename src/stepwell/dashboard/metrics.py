"""Metrics of the pool in Prometheus' format, from data that the dashboard already has.

Invariants:
- A scrape costs the pool no more than an open page.
- If the pool does not answer, stepwell_pool_up is 0 and the other metrics have no values.
- For each channel, accepted = held + trained + wasted, in steps and in tokens.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stepwell.dashboard.queries import DashboardState
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.stats import ChannelStats, PoolStats, StepCount

Readings = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the reading."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[PoolStats], Readings]

    def family(self, readings: Readings) -> Metric:
        family = self.kind(f"stepwell_pool_{self.name}", self.text, labels=self.labels)
        for labels, value in readings:
            family.add_metric(labels, value)
        return family


def _one(name: str, text: str, read: Callable[[PoolStats], float]) -> MetricDefinition:
    return MetricDefinition(GaugeMetricFamily, name, text, (), lambda stats: [((), read(stats))])


def _by_channel(
    name: str, text: str, read: Callable[[ChannelStats], float], *, counts: bool = False
) -> MetricDefinition:
    def readings(stats: PoolStats) -> Readings:
        return (((channel,), read(found)) for channel, found in stats.channels.items())

    return MetricDefinition(CounterMetricFamily if counts else GaugeMetricFamily, name, text, ("channel",), readings)


def _counted(name: str, text: str, label: str, read: Callable[[PoolStats], Mapping[str, int]]) -> MetricDefinition:
    def readings(stats: PoolStats) -> Readings:
        return (((value,), count) for value, count in read(stats).items())

    return MetricDefinition(CounterMetricFamily, name, text, (label,), readings)


def _wasted(name: str, text: str, read: Callable[[StepCount], float]) -> MetricDefinition:
    def readings(stats: PoolStats) -> Readings:
        for channel, channel_stats in stats.channels.items():
            for cause, count in channel_stats.dropped.items():
                yield (channel, cause), read(count)
            for kind, count in channel_stats.left_out.items():
                yield (channel, f"left out: {kind}"), read(count)

    return MetricDefinition(CounterMetricFamily, name, text, ("channel", "cause"), readings)


METRICS = (
    _one("policy_version", "The policy version that engines serve.", lambda stats: stats.policy_version),
    _one("missing_shards", "Shards that do not answer, and are not counted.", lambda stats: len(stats.missing)),
    _one("archive_waiting_bytes", "Groups not archived yet.", lambda stats: stats.archiving.waiting_bytes),
    _one("archive_failures", "Failed attempts to archive.", lambda stats: stats.archiving.failures),
    _one(
        "archive_dropped_groups", "Groups not archived: too many waited.", lambda stats: stats.archiving.dropped_groups
    ),
    _one("leases", "Leases that trainers hold.", lambda stats: stats.leases),
    _one(
        "shards_short_of_disk",
        "Shards that take no new data because their journal's disk is nearly full.",
        lambda stats: stats.short_of_disk,
    ),
    _one(
        "shards_forgetting_waits",
        "Shards that cannot remove now what is to be forgotten; their log says why.",
        lambda stats: stats.removal_waits,
    ),
    _one(
        "overdue_by_clock",
        "Trajectories that are too old by the wall clock, and not by the time that the pool ran.",
        lambda stats: stats.overdue_by_clock,
    ),
    _one("uniform_groups", "Groups handed out in which all rollouts were equal.", lambda stats: stats.uniform_groups),
    _one("grace_steps", "Steps taken in shortly after a completion.", lambda stats: stats.in_grace),
    _one(
        "unfinished_rollouts",
        "Rollouts completed as failures because they were open at their group's deadline.",
        lambda stats: stats.unfinished,
    ),
    _one("sessions_open", "Sessions of live users whose trajectory is open.", lambda stats: stats.sessions.open),
    _one(
        "sessions_deferred",
        "Ready items that a batch left in the queue because of --max-share-per-user.",
        lambda stats: stats.sessions.deferred,
    ),
    _one("sessions_ended_idle", "Trajectories that ended by idle sessions.", lambda stats: stats.sessions.ended_idle),
    _by_channel("groups", "Groups held and not under lease.", lambda channel: channel.groups),
    _by_channel("ready_groups", "Groups that a trainer could take.", lambda channel: channel.ready_groups),
    _by_channel("trajectories", "Trajectories neither taken nor dropped.", lambda channel: channel.trajectories),
    _by_channel("bytes", "Of tokens, log-probabilities and masks, as stored.", lambda channel: channel.nbytes),
    _by_channel("accepted_steps", "Steps taken in.", lambda channel: channel.accepted.steps, counts=True),
    _by_channel("accepted_tokens", "Their tokens.", lambda channel: channel.accepted.tokens, counts=True),
    _by_channel(
        "trained_steps", "Steps that a trainer acknowledged.", lambda channel: channel.shipped.steps, counts=True
    ),
    _by_channel("trained_tokens", "Their tokens.", lambda channel: channel.shipped.tokens, counts=True),
    _wasted("wasted_steps", "Accepted steps never to be trained: dropped, or left out.", lambda count: count.steps),
    _wasted("wasted_tokens", "Their tokens.", lambda count: count.tokens),
    _counted("refused_steps", "Steps not taken in.", "cause", lambda stats: stats.refused),
    _counted("quarantined_steps", "Steps in which something is inconsistent.", "kind", lambda stats: stats.quarantined),
    _counted("policy_decisions", "Decisions about versions of the policy.", "action", lambda stats: stats.decided),
    _one("scoring_waiting", "Trajectories that lack a reward.", lambda stats: stats.scoring.waiting),
    _counted("scoring_failed", "Judgements that gave no reward.", "outcome", lambda stats: stats.scoring.failed),
)


def families(stats: PoolStats | None, ages: Mapping[str, float]) -> Iterator[Metric]:
    """All metrics; without values if there are no stats. `ages` are the ages of the oldest groups, by channel."""
    up = _one("up", "1 if the pool answers the dashboard, otherwise 0.", lambda _: 1.0)
    yield up.family([((), float(stats is not None))])
    for definition in METRICS:
        yield definition.family(() if stats is None else definition.read(stats))
    text = "Since the oldest group that is neither trained nor dropped was opened; 0 if there is none."
    oldest = GaugeMetricFamily("stepwell_pool_oldest_group_age_seconds", text, labels=("channel",))
    for channel, age in ages.items():
        oldest.add_metric((channel,), age)
    yield oldest


def ages_of(stats: PoolStats, opened: Mapping[str, float], now: float) -> dict[str, float]:
    """A channel whose groups are not indexed yet has no age."""
    known = {
        name: opened.get(name, now) for name, found in stats.channels.items() if name in opened or not found.groups
    }
    return {name: max(0.0, now - at) for name, at in known.items()}


async def exposition(state: DashboardState) -> tuple[bytes, str]:
    """The text and its content type."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collected(list(await _families(state))))
    encode, content_type = choose_encoder("")
    return encode(registry), content_type


async def _families(state: DashboardState) -> Iterator[Metric]:
    try:
        stats = await state.stats.get()
    except PoolUnavailable:
        return families(None, {})
    is_current = state.follower.error is None
    return families(stats, ages_of(stats, state.index.oldest_held(), time.time()) if is_current else {})


class _Collected(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found
