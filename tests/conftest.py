import pytest

from tests.originals.atropos.counts import EnvironmentCounts


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(EnvironmentCounts())
