from collections.abc import AsyncIterator

import pytest

from tests.rig.fake_engine import FakeEngine
from tests.rig.gateways import serve_gateway
from tests.rig.memory_pool import MemoryPool


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
def pool() -> MemoryPool:
    """Tests that need other limits make their own gateway."""
    return MemoryPool()


@pytest.fixture
async def gateway(pool: MemoryPool, engine: FakeEngine) -> AsyncIterator[str]:
    async with serve_gateway(pool, [engine.url], prompt_length=8192, response_length=256) as url:
        yield url
