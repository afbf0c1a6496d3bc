from collections.abc import AsyncIterator

import httpx
import pytest

from tests.rig.atropos.server import serve_atropos
from tests.rig.memory_pool import MemoryPool


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool()


@pytest.fixture
async def client(pool: MemoryPool) -> AsyncIterator[httpx.AsyncClient]:
    """Of an Atropos server without keys."""
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        yield client
