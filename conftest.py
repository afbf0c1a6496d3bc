"""What all tests share, those of the benchmarks too: the order and the processes of a run, a model, Ray, PostgreSQL."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from rig.ray_cluster import RayCluster, start_ray
from rig.tiny_model import make_tiny_model

SETTINGS = {
    "OMP_NUM_THREADS": "1",  # threads of small models only wait for one another
    "RAY_health_check_initial_delay_ms": "1000",  # a node that a test has ended is gone in 3 seconds instead of 16
    "RAY_health_check_period_ms": "500",
}
os.environ.update(SETTINGS)  # torch and Ray read them when they are imported; child processes inherit them

WITHOUT_SHARED_ENGINE = (
    *("atropos_environments", "atroposlib", "batch_torch", "conformance", "dashboard", "demo"),
    *("doctor_harness", "engine_restarted", "foreign_environments", "harnesses", "live_demo", "nemo_gym"),
    *("real_agents", "tinker", "trl", "verl"),
)
"""How the names of those e2e files begin that start an engine of their own, or need none."""


LONGEST = (
    "tests/e2e/test_broken_tool_call",  # with it, all that share the engine
    "tests/originals/atropos/test_environments",
    "tests/e2e/test_tinker_service",
    "benchmarks/tests/integration/test_rows_in_short",
    "tests/integration/trainers/test_killed_trainer",
    "tests/e2e/test_demo",
    "tests/e2e/test_atroposlib",
    "tests/e2e/test_atropos_environments",
    "tests/integration/up/test_up",
    "tests/e2e/test_harnesses",
    "tests/integration/gateway/test_process",
    "tests/integration/pool/test_placement",
    "tests/integration/exports/test_round_trip",
    "tests/unit/pool/rules/test_pool_properties",
    "tests/unit/rewards/runner/test_runner",
)
"""The files that take longest, in the order in which they begin."""


class EngineInOneProcess(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """For `-n`: tests that share the engine run in one process. Otherwise a file stays together."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        folder, _, name = file.rpartition("/test_")
        shares_engine = folder == "tests/e2e" and not name.startswith(WITHOUT_SHARED_ENGINE)
        return "engine" if shares_engine else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> EngineInOneProcess:
    config.option.loadscopereorder = False  # else the files with most tests begin, which are not the longest
    return EngineInOneProcess(config, log)


class FailuresAtOnce:
    """Names each failure when it happens: a run that is cut off has said what failed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            cause = report.longreprtext.strip().rpartition("\n")[2]
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when}, {report.duration:.0f} s): {cause}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that at the end no process is busy alone."""
    places = {f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that vLLM can serve and whose tokenizer reads the fake engine's ids; not to be changed."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A database for journals. Tests take different shards of it."""
    from rig.postgres import QUICK, has_postgres, postgres_server  # brings the gateway, which few tests need

    pytest.importorskip("psycopg")
    if not has_postgres():
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_server(*QUICK) as server:
        yield server.url


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    with start_ray() as cluster:
        yield cluster


@pytest.fixture
def namespace(ray_cluster: RayCluster) -> Iterator[str]:
    """A Ray namespace of the test's own."""
    with ray_cluster.namespace() as name:
        yield name
