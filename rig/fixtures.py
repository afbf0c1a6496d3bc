"""Fixtures of integration tests: a conftest.py imports those that its folder needs."""

from collections.abc import AsyncIterator

import pytest

from rig.fake_engine import FakeEngine
from rig.local_pool import LocalPool


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def two() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    async with FakeEngine() as first, FakeEngine() as second:
        yield first, second


@pytest.fixture
def pool() -> LocalPool:
    """Tests that need other limits make their own."""
    return LocalPool()
