"""The chart of benchmarks.growth: one panel for each axis, each curve relative to its smallest size, on log scales."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepwell.common.imports import require

from benchmarks.growth_rig.curve import Curve, Figures, Shape
from benchmarks.growth_rig.tables import shown

TITLE = "How cost grows"
DESCRIPTION = (
    "One panel for each size that can grow: held steps, shards, waiting consumers, waiting producers, turns. Each line "
    "is a figure relative to its value at the smallest size. A flat curve stays near 1; a linear one stays below the "
    "dashed line, along which cost grows as the size does."
)
EXPLANATION = (
    "Each line is one figure, relative to its value at the smallest size.\n"
    "Both scales are logarithmic.\n\n"
    "flat: it stays near 1\n"
    "linear: it rises no more steeply than the dashed line\n\n"
    "In brackets: the value at the largest size."
)
FLAT_COLORS = ("#23807a", "#2f6fb3", "#7a5ea8", "#5b8c3a", "#1f9bb0")
LINEAR_COLORS = ("#b86b1d", "#b3392f", "#c2568c", "#8a6d1f", "#d4a017")
MARKERS = "os^Dv"
DARK = "@media (prefers-color-scheme: dark) { svg { filter: invert(0.88) hue-rotate(180deg) } }"
"""Paper becomes dark, text becomes light, and colours stay what they are."""


def draw(axes: Mapping[str, Sequence[Curve]], figures: Figures, folder: Path) -> None:
    """growth.png and growth.svg. `axes` has the curves of each panel under its title."""
    require("matplotlib", "demo")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": TITLE, "font.size": 10}):
        figure: Any = Figure(figsize=(12, 5.6 * ((len(axes) + 1) // 2)), layout="constrained")
        FigureCanvasAgg(figure)
        for panel, (title, curves) in zip(_panels(figure, len(axes)), axes.items(), strict=True):
            _draw_panel(panel, title, curves, figures)
        figure.savefig(folder / "growth.png", dpi=110)
        figure.savefig(folder / "growth.svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = folder / "growth.svg"
    svg.write_text(for_the_site(svg.read_text()))


def _panels(figure: Any, count: int) -> list[Any]:
    grid = figure.subplots((count + 1) // 2, 2).flat
    panels = list(grid)
    for empty in panels[count:]:
        empty.set_axis_off()
        empty.text(0.05, 0.95, EXPLANATION, va="top", linespacing=1.6)
    return panels[:count]


def _draw_panel(panel: Any, title: str, curves: Sequence[Curve], figures: Figures) -> None:
    styles = {
        Shape.FLAT: iter(zip(FLAT_COLORS, MARKERS, strict=True)),
        Shape.LINEAR: iter(zip(LINEAR_COLORS, MARKERS, strict=True)),
    }
    sizes = sorted({size for curve in curves for size in curve.points(figures)})
    panel.plot(
        sizes, [size / sizes[0] for size in sizes], "--", color="#9aa0a6", zorder=3, label="growth as the size grows"
    )
    for curve in curves:
        points = curve.points(figures)
        first, last = points[min(points)], max(points)
        start = min(points) / sizes[0] if curve.shape is Shape.LINEAR else 1.0  # lines of one slope lie together
        color, marker = next(styles[curve.shape])
        panel.plot(
            list(points),
            [value / first * start for value in points.values()],
            marker=marker,
            markersize=5,
            color=color,
            label=f"{curve.shape}: {curve.unit} ({shown(points[last])} at {last:,})",
        )
    panel.set(xscale="log", yscale="log", xlabel=title, ylabel="relative to the smallest size")
    panel.set_xticks(sizes, _labels(sizes))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panel.minorticks_off()
    lowest = min(min(line.get_ydata()) for line in panel.lines)
    panel.set_ylim(min(0.2, lowest / 1.5), max(10.0, 2 * sizes[-1] / sizes[0]))
    panel.grid(alpha=0.3)
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9, frameon=False)


def _labels(sizes: Sequence[int]) -> list[str]:
    """A size that is close to the next one has no room for its own."""
    return ["" if later < 2.5 * size else f"{size:,}" for size, later in pairwise([*sizes, 10 * sizes[-1]])]


def for_the_site(svg: str) -> str:
    """As the other pictures of the site: with a title and a description, dark where the reader wants that, and without
    addresses of others."""
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL).lstrip()
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    head = f'<title id="title">{TITLE}</title>\n<desc id="desc">{DESCRIPTION}</desc>\n<style>{DARK}</style>'
    opening, end, rest = svg.partition(">")
    return f'{opening} role="img" aria-labelledby="title desc"{end}\n{head}{rest}'
