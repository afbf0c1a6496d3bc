"""The benchmark's own proof, with fewer steps."""

from pathlib import Path

import pytest

from benchmarks.exports import MOST_MB, measure
from rig.ray_cluster import RayCluster


@pytest.mark.nightly
def test_a_few_thousand_steps_are_bit_equal_in_bounded_memory(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    figures = measure(ray_cluster, namespace, tmp_path, 3_200)
    assert (figures["steps"], figures["bit_equal"]) == (3_200, 1)
    assert max(figures["export_peak_mb"], figures["import_peak_mb"]) < MOST_MB
