"""How cost grows with what a deployment has more of: held steps, shards, waiting consumers and producers, turns.

Each axis measures real parts at several sizes (benchmarks/growth_rig has a file for each). A curve must be flat, or
linear at most; the reason is printed next to it. `--out` writes the figures (growth.json), the tables (growth.md) and
the chart (growth.png, growth.svg) to a folder. `--figures` takes the figures of an earlier run, and `--only` measures
some axes anew. `--page` writes the tables and the chart into docs/operations/scaling.md.

    python -m benchmarks.growth [--quick] [--only AXIS ...] [--out FOLDER] [--figures FILE] [--page]
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rig.ray_cluster import RayCluster, start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from benchmarks.growth_rig import held_steps, parts, shards, turns, waiting
from benchmarks.growth_rig.chart import draw
from benchmarks.growth_rig.curve import Curve, Figures
from benchmarks.growth_rig.page import PAGE, PICTURES, curve_tables, sizes, with_parts
from benchmarks.growth_rig.sizing import NEEDED_FOR_SIZES
from benchmarks.report import closing, report
from benchmarks.results import Result, commit, machine, now

STORE = 2**30
NAME = "growth"
CURVES: Mapping[str, Sequence[Curve]] = {
    "Held steps": held_steps.CURVES,
    "Number of shards": shards.CURVES,
    "Waiting consumers": waiting.CONSUMER_CURVES,
    "Waiting producers": waiting.PRODUCER_CURVES,
    "Turns of a trajectory": turns.CURVES,
}
"""By the title of their table and panel."""
ON_RAY: Mapping[str, Callable[[RayCluster, Path, bool], dict[str, float]]] = {
    "turns": turns.measure,
    "parts": parts.measure,
    "waiting": waiting.measure,
    "shards": shards.measure,
}
HELD = "held_steps"


def measure(only: Sequence[str], *, quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    if HELD in only:
        figures |= held_steps.measure(quick)
    if any(axis in only for axis in ON_RAY):
        with tempfile.TemporaryDirectory(prefix="growth-") as folder, start_ray(object_store_memory=STORE) as cluster:
            for axis, measure_axis in ON_RAY.items():
                if axis in only:
                    figures |= measure_axis(cluster, Path(folder), quick)
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def measured_curves(figures: Figures) -> dict[str, list[Curve]]:
    """Those of the axes that were measured."""
    found = {title: [curve for curve in curves if len(curve.points(figures)) > 1] for title, curves in CURVES.items()}
    return {title: curves for title, curves in found.items() if curves}


def with_verdicts(figures: Figures) -> tuple[dict[str, float], dict[str, float]]:
    """The figures with the verdict of each curve, and the bounds of these."""
    curves = [curve for curves in measured_curves(figures).values() for curve in curves]
    return (
        {**figures, **{curve.verdict_name: curve.verdict(figures) for curve in curves}},
        {curve.verdict_name: curve.bound for curve in curves},
    )


def page_parts(figures: Figures) -> dict[str, str]:
    """In Markdown. The sizes need all figures of the long form."""
    parts = {"curves": curve_tables(measured_curves(figures), figures)}
    return parts | ({"sizes": sizes(figures)} if figures.keys() >= NEEDED_FOR_SIZES else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    axes = (HELD, *ON_RAY)
    parser.add_argument("--quick", action="store_true", help="small sizes only; no targets")
    parser.add_argument("--only", nargs="*", choices=axes, help="these axes alone")
    parser.add_argument("--out", type=Path, help="folder for figures, tables and the chart")
    parser.add_argument("--figures", type=Path, help="growth.json of an earlier run: what it has is not measured")
    parser.add_argument("--page", action="store_true", help="bring the documentation up to date")
    given = parser.parse_args()
    before = machine()
    earlier = {} if given.figures is None else json.loads(given.figures.read_text())
    only = given.only or ([] if earlier else axes)
    figures, bounds = with_verdicts({**earlier.get("figures", {}), **measure(only, quick=given.quick)})
    bounds = {} if given.quick else bounds
    told = {"date": now(), "commit": commit(), "machine": before, **closing(figures, bounds)} if only else {}
    command = f"python -m benchmarks.{NAME}"
    if earlier and only:
        command += f", {' and '.join(only)} in this run and the other axes in earlier ones"
    run = Result(**{"name": NAME, **earlier, "command": command, **told})
    text = "\n\n".join(page_parts(figures).values()) + "\n"
    print(f"\n{text}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        run.write(given.out)
        (given.out / "growth.md").write_text(text)
        draw(measured_curves(figures), figures, given.out)
    if given.page:
        PAGE.write_text(with_parts(PAGE.read_text(), page_parts(figures)))
        draw(measured_curves(figures), figures, PICTURES)
    report(figures, bounds)


if __name__ == "__main__":
    main()
