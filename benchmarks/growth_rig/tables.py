"""The figures of benchmarks.growth as tables, for a terminal and for docs/operations/scaling.md."""

from collections.abc import Iterable, Sequence

from benchmarks.growth_rig.curve import Curve, Figures
from benchmarks.growth_rig.sizing import AGENTS, Sizes, size

SIZED = (
    ("calls a second", "calls_s"),
    ("calls in flight", "calls_in_flight"),
    ("cores for gateways: whole answers", "gateway_cores"),
    ("cores for gateways: all answers streamed", "streamed_cores"),
    ("gateway processes: whole answers", "gateways"),
    ("gateway processes: all answers streamed", "streamed_gateways"),
    ("memory of the latter, GB", "gateway_gb"),
    ("spools, GB", "spool_gb"),
    ("from engines to gateways, MB/s", "to_gateways_mb_s"),
    ("from gateways to the pool, MB/s", "to_pool_mb_s"),
    ("cores for shards", "shard_cores"),
    ("shards", "shards"),
    ("memory of the shards, GB", "shard_gb"),
    ("journals, GB", "journal_gb"),
    ("written to journals, MB/s", "journal_mb_s"),
    ("restart of a shard, s", "restart_s"),
    ("a batch in Ray's object store, MB", "batch_mb"),
    ("archive before compression, GB/h", "archive_gb_h"),
)
"""The rows of the sizing table: what it says, and the field of Sizes."""


def shown(value: float) -> str:
    """With three digits that count."""
    if value >= 1_000:
        return f"{round(value):,}"
    return f"{value:.3g}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def curve_table(curves: Sequence[Curve], figures: Figures) -> str:
    """Of one axis."""
    sizes = sorted({size for curve in curves for size in curve.points(figures)})
    rows = []
    for curve in curves:
        points = curve.points(figures)
        values = [shown(points[size]) if size in points else "" for size in sizes]
        rows.append([curve.unit, *values, curve.said(figures), curve.reason])
    return markdown(["", *(f"{size:,}" for size in sizes), "it is", "because"], rows)


def sizing_table(figures: Figures) -> str:
    sized: list[Sizes] = [size(agents, figures) for agents in AGENTS]
    rows = [[said, *(shown(getattr(one, name)) for one in sized)] for said, name in SIZED]
    return markdown(["", *(f"{agents:,} agents" for agents in AGENTS)], rows)
