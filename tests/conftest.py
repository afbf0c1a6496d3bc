from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.ray_cluster import RayCluster, start_ray
from tests.rig.tiny_model import make_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In several processes (`-n 2 --dist loadgroup`): one has all that needs the engine, a file stays together."""
    for item in items:
        needs_engine = "vllm" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("engine" if needs_engine else item.path.as_posix()))


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
