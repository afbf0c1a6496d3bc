from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.rig.ray_cluster import RayCluster, start_ray
from tests.rig.tiny_model import make_tiny_model


class TwoSides(LoadScopeScheduling):  # type: ignore[misc]  # xdist tells no types
    """For `-n 2`: one process has all of e2e, and with it the only engine; of the rest, a file stays together."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return "e2e" if "tests/e2e/" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoSides:
    return TwoSides(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that vLLM can serve and whose tokenizer reads the fake engine's ids; not to be changed."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    with start_ray() as cluster:
        yield cluster


@pytest.fixture
def namespace(ray_cluster: RayCluster) -> Iterator[str]:
    """A Ray namespace of the test's own."""
    with ray_cluster.namespace() as name:
        yield name
