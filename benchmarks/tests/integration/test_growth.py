"""The axes of benchmarks.growth, each run for a moment: it measures what it says, at every size."""

from pathlib import Path

import pytest

from benchmarks.growth_rig import held_steps, parts, shards, turns, waiting
from benchmarks.growth_rig.curve import Curve
from rig.ray_cluster import RayCluster


def check(curves: tuple[Curve, ...], figures: dict[str, float], sizes: tuple[int, ...]) -> None:
    """Every curve has a value at every size."""
    for curve in curves:
        points = curve.points(figures)
        assert tuple(points) == sizes, curve.key
        assert min(points.values()) > 0, curve.key


def test_shards_hold_their_steps_while_they_are_measured() -> None:
    figures = held_steps.measure(quick=True)
    first = held_steps.QUICK_SIZES[0]
    measured = tuple(curve for curve in held_steps.CURVES if curve.at(first) in figures)
    check(measured, figures, held_steps.QUICK_SIZES)
    assert {curve.name for curve in held_steps.CURVES} - {curve.name for curve in measured} == {
        "memory_resident_mb",
        "journal_disk_mb",
    }


def test_pools_of_several_shards_are_measured(ray_cluster: RayCluster, tmp_path: Path) -> None:
    check(shards.CURVES, shards.measure(ray_cluster, tmp_path, quick=True), shards.QUICK_SIZES)


def test_consumers_and_producers_wait_and_get_what_is_sent(ray_cluster: RayCluster, tmp_path: Path) -> None:
    figures = waiting.measure(ray_cluster, tmp_path, quick=True)
    check((*waiting.CONSUMER_CURVES, *waiting.PRODUCER_CURVES), figures, waiting.QUICK_SIZES)


def test_a_conversation_goes_on_for_its_turns(ray_cluster: RayCluster, tmp_path: Path) -> None:
    figures = turns.measure(ray_cluster, tmp_path, quick=True)
    check(turns.CURVES, figures, turns.QUICK_SIZES)
    first, *_, last = (figures[f"turns_prompt_tokens_at_{size}"] for size in turns.QUICK_SIZES)
    assert last > 20 * first


@pytest.mark.nightly
def test_the_parts_of_a_deployment_are_measured(ray_cluster: RayCluster, tmp_path: Path) -> None:
    figures = parts.measure(ray_cluster, tmp_path, quick=True)
    assert min(figures.values()) > 0
