"""docs/reference/metrics.md: every metric with its labels, from the collectors themselves."""

from collections.abc import Iterator
from typing import Any, cast

from stepwell.gateway.metrics import GatewayMetrics

from stepwell.atropos.registry import AtroposMetrics
from stepwell.dashboard.metrics import families
from stepwell.gateway.routes.operator_routes import register_pool_readings, register_readings

HEAD = """# Metrics

Written by `scripts/reference.py` from the code. `GET /metrics`, with a control key where there are keys; [how to use
them](../operations/metrics.md). `prometheus_client` adds metrics of the process:
`process_cpu_seconds_total`, `process_resident_memory_bytes`, …
"""


def page() -> str:
    tables = (
        _table("The gateway", gateway_collectors()),
        _table("The Atropos server", atropos_collectors()),
        _table("The dashboard, of the pool", dashboard_families()),
    )
    return HEAD + "".join(tables)


def gateway_collectors() -> Iterator[Any]:
    metrics = GatewayMetrics()
    nothing = cast("Any", None)
    register_readings(metrics, nothing, nothing, nothing, cast("Any", object()))
    register_pool_readings(metrics, nothing, cast("Any", object()))
    yield from _stepwells(metrics)


def atropos_collectors() -> Iterator[Any]:
    yield from _stepwells(AtroposMetrics(lambda: (), lambda: ()))


def dashboard_families() -> Iterator[Any]:
    for family in cast("Iterator[Any]", families(None, {})):
        family.label_names = family._labelnames
        yield family


def _stepwells(metrics: Any) -> Iterator[Any]:
    """The registry's collectors; those that are read at the scrape give families without values."""
    for collector in metrics._registry._collector_to_names:
        families = collector.describe() if hasattr(collector, "describe") else collector.collect()
        for family in families:
            if family.name.startswith("stepwell_"):
                family.label_names = getattr(collector, "_labelnames", getattr(family, "_labelnames", ()))
                yield family


def _table(title: str, families: Iterator[Any]) -> str:
    lines = [f"\n## {title}\n", "| metric | type | labels | |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda family: str(family.name)):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in family.label_names)
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines) + "\n"
