"""The curves of benchmarks.growth are judged as they are, and the page on scaling has what the kept figures give."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.growth import CURVES, measured_curves, page_parts, with_verdicts
from benchmarks.growth_rig.chart import draw
from benchmarks.growth_rig.curve import Curve, Shape
from benchmarks.growth_rig.page import PAGE, PICTURES, with_parts
from benchmarks.growth_rig.sizing import AGENTS, LOAD, NEEDED_FOR_SIZES, size
from rig.docs_pages import CHECKOUT

KEPT = json.loads((CHECKOUT / "benchmarks" / "results" / "growth.json").read_text())
FIGURES = KEPT["figures"]
SIZES = (100, 1_000, 10_000, 100_000)
FLAT = Curve(axis="size", name="cost", unit="ms", shape=Shape.FLAT, reason="")
LINEAR = replace(FLAT, shape=Shape.LINEAR)


def figures_of(exponent: float, fixed: float = 0.0) -> dict[str, float]:
    return {FLAT.at(size): fixed + float(size) ** exponent for size in SIZES}


@pytest.mark.parametrize(
    ("curve", "exponent", "is_met"),
    [(FLAT, 0.0, True), (FLAT, 0.5, False), (LINEAR, 0.0, True), (LINEAR, 1.0, True), (LINEAR, 2.0, False)],
)
def test_a_curve_that_grows_faster_than_it_may_misses_its_bound(curve: Curve, exponent: float, is_met: bool) -> None:
    figures = figures_of(exponent)
    assert (curve.verdict(figures) <= curve.bound) is is_met
    assert curve.said(figures).startswith("NOT") is not is_met


def test_fixed_costs_of_small_sizes_do_not_hide_a_square() -> None:
    figures = figures_of(2.0, fixed=1e8)
    assert LINEAR.verdict(figures) > LINEAR.bound


def test_a_flat_curve_is_compared_from_the_size_that_it_names() -> None:
    figures = figures_of(0.0) | {FLAT.at(100): 0.1}
    assert FLAT.verdict(figures) == 10.0
    assert replace(FLAT, since=1_000).verdict(figures) == 1.0


def test_curves_have_different_names_and_each_has_a_reason() -> None:
    curves = [curve for curves in CURVES.values() for curve in curves]
    assert len({curve.key for curve in curves}) == len(curves)
    assert all(curve.reason.endswith(".") for curve in curves)


def test_the_kept_run_has_every_curve_and_what_the_sizes_need() -> None:
    assert {title: len(curves) for title, curves in measured_curves(FIGURES).items()} == {
        title: len(curves) for title, curves in CURVES.items()
    }
    assert FIGURES.keys() >= NEEDED_FOR_SIZES
    figures, bounds = with_verdicts(FIGURES)
    assert figures == FIGURES
    assert KEPT["missed"] == [name for name, bound in bounds.items() if figures[name] > bound]


def test_the_page_has_the_tables_and_the_sizes_of_the_kept_figures() -> None:
    page = PAGE.read_text()
    parts = page_parts(FIGURES)
    assert set(parts) == {"curves", "sizes"}
    assert with_parts(page, parts) == page, "run python -m benchmarks.growth --figures FILE --page"


@pytest.mark.parametrize("agents", AGENTS)
def test_the_sizes_follow_from_the_figures(agents: int) -> None:
    """The same arithmetic by hand, for what the page says of the agents."""
    sized = size(agents, FIGURES)
    calls = agents / 20
    history = (FIGURES["turns_gateway_cpu_ms_at_2000"] - FIGURES["turns_gateway_cpu_ms_at_100"]) / (
        FIGURES["turns_prompt_tokens_at_2000"] - FIGURES["turns_prompt_tokens_at_100"]
    )
    a_call = FIGURES["call_cpu_ms"] * 500 / 256 + (7_500 - 2_048) * history
    assert sized.calls_s == calls
    assert sized.gateway_cores == pytest.approx(calls * a_call / 1e3)
    assert sized.gateways == math.ceil(calls * a_call / 1e3 / 0.6)
    shard_cores = calls * FIGURES["waiting_producers_step_cpu_us_at_256"] / 1e6
    assert sized.shards == math.ceil(shard_cores / 0.5)
    held = agents * 5 + 2 * 1_024 * 10
    assert sized.journal_gb == pytest.approx(held * 8_000 / 1e9)
    assert sized.shard_gb == pytest.approx(
        (
            agents * FIGURES["trajectory_bytes"]
            + held * FIGURES["step_bytes"]
            + sized.shards * FIGURES["shards_resident_mb_at_64"] / 64 * 1e6
        )
        / 1e9
    )


def test_the_page_describes_the_agents_that_are_counted() -> None:
    said = "makes a call every 20 s, whose answer takes 10 s, with 1,000 new prompt tokens and 500 response tokens"
    assert (LOAD.seconds_a_call, LOAD.answer_seconds, LOAD.prompt_tokens, LOAD.response_tokens) == (20, 10, 1_000, 500)
    assert said in PAGE.read_text()


def test_the_chart_is_drawn_with_every_axis_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    draw(measured_curves(FIGURES), FIGURES, tmp_path)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "growth.svg").read_text()
    assert all(title in svg for title in CURVES)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert (PICTURES / "growth.svg").exists()
    assert (PICTURES / "growth.png").exists()
