from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

from tests.unit.pool.shard.journals import Place, PostgresPlace

# The machines are shared: how long an example takes says nothing about the code.
settings.register_profile("stepwell", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stepwell")


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of journal in turn."""
    if request.param == "sqlite":
        return tmp_path / "pool.sqlite"
    return PostgresPlace(request.getfixturevalue("postgres_url"), uuid4().hex)
