from collections.abc import AsyncIterator

import httpx
import pytest

from tests.rig.doors import serve_door
from tests.rig.memory_pool import MemoryPool


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool()


@pytest.fixture
async def client(pool: MemoryPool) -> AsyncIterator[httpx.AsyncClient]:
    """Of a door that is open to all."""
    async with serve_door(pool) as url, httpx.AsyncClient(base_url=url) as client:
        yield client
