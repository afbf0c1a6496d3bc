"""The gateway's metrics, which /metrics shows in Prometheus's format.

- The registry is this object's own, not the process-wide one.
- Frequent events are counted here. Values that other objects hold are read at the moment of a scrape.
- The values of a label are few: no uid, path or text of a caller becomes one, and of the exception types that callers
  name at most MOST_NAMES.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stepwell.steps.step import Step
from stepwell.steps.trainable import fault_kind

log = logging.getLogger("stepwell.gateway")

M = TypeVar("M", Counter, Histogram)
Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily
Label: TypeAlias = str | int
Reading: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values with the values of their labels."""

Counts: TypeAlias = defaultdict[tuple[Label, ...], int]
"""Counts by the values of their labels."""
PROMPT, RESPONSE = ("prompt",), ("response",)
CALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LAG_INTERVAL = 0.1


class MetricChildren(dict[Label | tuple[Label, ...], M]):
    """A metric's children by label values. Each is looked up in the metric once: that costs more than counting."""

    def __init__(self, metric: M) -> None:
        self._child: Callable[..., M] = metric.labels

    def __missing__(self, values: Label | tuple[Label, ...]) -> M:
        child = self._child(*values) if isinstance(values, tuple) else self._child(values)
        self[values] = child
        return child


@dataclass(frozen=True, slots=True)
class ReadAtScrape(Collector):
    empty: Callable[[], Family]
    read: Callable[[], Reading]

    def describe(self) -> Iterator[Family]:
        yield self.empty()

    def collect(self) -> Iterator[Family]:
        family = self.empty()
        for labels, value in self.read():
            family.add_metric(labels, value)
        yield family


MOST_NAMES = 50
OTHERS = "others"
"""The label of exception types beyond that."""


class RemovedFields:
    """Fields of requests that no engine gets: all are counted, and each name is said once."""

    def __init__(self, metrics: "GatewayMetrics") -> None:
        self._metrics = metrics
        self._said: set[str] = set()

    def note(self, names: Sequence[str]) -> None:
        self._metrics.fields_removed.inc(len(names))
        for name in names:
            if name not in self._said and len(self._said) < MOST_NAMES:
                self._said.add(name)
                log.warning("the field %r of a request is not forwarded; see --forward-fields in docs/gateway.md", name)


class ReplacedSampling:
    """Sampling parameters that agents asked for and did not get: all are counted, and each channel's first is said."""

    def __init__(self, metrics: "GatewayMetrics") -> None:
        self._metrics = metrics
        self._said: set[str] = set()

    def note(self, channel: str, names: Iterable[str], told: str) -> None:
        for name in names:
            self._metrics.sampling_replaced[name].inc()
        if channel not in self._said:
            self._said.add(channel)
            log.warning(
                "channel %s: answers are sampled as the trainer computes, not as the agent asks: %s; further ones are "
                "only counted, and told in the header x-stepwell-sampling. --sampling %s=as_asked (in the environment "
                "STEPWELL_GATEWAY_SAMPLING) gives agents what they ask for; see docs/gateway.md",
                *(channel, told, channel),
            )


class GatewayMetrics:
    def __init__(self, lag_interval: float = LAG_INTERVAL) -> None:
        self._lag_interval = lag_interval
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._calls = self._counted("calls", "Calls answered.", "kind", "status")
        self._seconds = self._histogram("call_seconds", "From a call to the end of its answer.")
        self._first_byte = self._histogram("first_byte_seconds", "From a call to the first byte of its answer.")
        self._tokens = self._counted("tokens", "Tokens of answered calls, as counted by the engine.", "direction")
        self._tokens[PROMPT] = self._tokens[RESPONSE] = 0
        self._steps = self._counted("steps", "Steps recorded.", "exactness")
        self._quarantined = self._counter("quarantined", "Recorded steps that do not add up.", "reason")
        self._untrainable = self._counter("untrainable", "Sound steps that are not trained unless asked for.", "reason")
        self.clients_gone = self._counter("clients_gone", "Clients that left before the end of their answer.", "kind")
        self.calls_refused = self._counter(
            "calls_refused", "Calls refused before an engine was asked, by the code of their error.", "kind", "code"
        )
        self.calls_unrecorded = self._counter("calls_unrecorded", "Model calls that were not recorded.", "cause")
        self.opt_outs_ignored = Counter(
            "stepwell_opt_outs_ignored",
            "Agents' calls that asked not to be recorded, and were.",
            registry=self._registry,
        )
        self.fields_removed = Counter(
            "stepwell_request_fields_removed", "Fields of requests that no engine got.", registry=self._registry
        )
        self.sampling_replaced = self._counter(
            "sampling_replaced", "Sampling parameters of agents' calls that were replaced or removed.", "parameter"
        )
        self._rollouts_ended = self._counted(
            "rollouts_ended", "Rollouts completed or aborted, by the exception that ended them, or none.", "exception"
        )
        self.calls_joined = self._counter("calls_joined", "Repeated calls that got the first one's answer.", "kind")
        self.calls_continued = self._counter("calls_continued", "Generations continued after a weight update.", "kind")
        self.bridge = self._counted(
            "bridge", "Chat calls by how their prompt was made: bridged, or why not.", "outcome"
        )
        self._lag = Histogram(
            "stepwell_loop_lag_seconds", "How late the event loop wakes.", buckets=LAG_BUCKETS, registry=self._registry
        )

    def call_done(
        self,
        kind: str,
        status: int,
        seconds: float,
        first_byte: float | None,
        prompt_tokens: int,
        response_tokens: int,
    ) -> None:
        self._calls[kind, status] += 1
        self._seconds[kind].observe(seconds)
        if first_byte is not None:
            self._first_byte[kind].observe(first_byte)
        self._tokens[PROMPT] += prompt_tokens
        self._tokens[RESPONSE] += response_tokens

    def steps_recorded(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._steps[(step.exactness,)] += 1
            if step.quarantine is not None:
                self._quarantined[fault_kind(step.quarantine)].inc()
            if step.untrainable is not None:
                self._untrainable[fault_kind(step.untrainable)].inc()

    def rollout_ended(self, exception: str) -> None:
        """The exception is empty if none ended it."""
        label = (exception or "none",)
        is_named = label in self._rollouts_ended or len(self._rollouts_ended) < MOST_NAMES
        self._rollouts_ended[label if is_named else (OTHERS,)] += 1

    def read_from(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        read: Callable[[], Reading],
        kind: Literal["gauge", "counter"] = "gauge",
    ) -> None:
        """Show under `name` what `read` returns at each scrape."""
        family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
        self._registry.register(ReadAtScrape(partial(family, name, text, labels=labels), read))

    async def watch_loop(self) -> None:
        """Measure how late the event loop wakes, until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(self._lag_interval)
            self._lag.observe(max(0.0, time.monotonic() - began - self._lag_interval))

    def exposition(self) -> tuple[bytes, str]:
        """All metrics as text, and the text's content type."""
        encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def _counted(self, name: str, text: str, *labels: str) -> Counts:
        """A counter for what every call counts: a plain addition costs less than `_counter`."""
        counts: Counts = defaultdict(int)

        def read() -> Reading:
            return [(tuple(map(str, values)), count) for values, count in counts.items()]

        self.read_from(f"stepwell_{name}", text, labels, read, "counter")
        return counts

    def _counter(self, name: str, text: str, *labels: str) -> MetricChildren[Counter]:
        return MetricChildren(Counter(f"stepwell_{name}", text, labels, registry=self._registry))

    def _histogram(self, name: str, text: str) -> MetricChildren[Histogram]:
        metric = Histogram(f"stepwell_{name}", text, ("kind",), buckets=CALL_BUCKETS, registry=self._registry)
        return MetricChildren(metric)
