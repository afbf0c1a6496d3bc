"""Metrics of the Atropos server in Prometheus' format. The values of a label are few and chosen here."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

ByChannel = Iterable[tuple[str, float]]


class AtroposMetrics(Collector):
    def __init__(self, steps: Callable[[], ByChannel], connected: Callable[[], ByChannel]) -> None:
        """`steps` and `connected` (environments) are read at each scrape."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._gauges = (
            ("stepwell_door_step", "Batches delivered, from the trainer's starting step.", steps),
            ("stepwell_door_environments", "Environments that are connected.", connected),
        )
        self._groups = self._counter("groups", "Groups that environments sent.", "result")
        self._batches = self._counter("batches", "Batches by their result.", "result")
        self._registry.register(self)

    def count_group(self, result: str) -> None:
        """received, duplicate or refused."""
        self._groups.labels(result).inc()

    def count_batch(self, result: str) -> None:
        """delivered or returned."""
        self._batches.labels(result).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, text, read in self._gauges:
            family = GaugeMetricFamily(name, text, labels=("channel",))
            for channel, value in read():
                family.add_metric((channel,), value)
            yield family

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"stepwell_door_{name}", text, (label,), registry=self._registry)
