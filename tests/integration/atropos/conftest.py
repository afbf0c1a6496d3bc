from collections.abc import AsyncIterator

import httpx
import pytest

from rig.atropos.server import serve_atropos
from rig.local_pool import LocalPool


@pytest.fixture
async def client(pool: LocalPool) -> AsyncIterator[httpx.AsyncClient]:
    """Of an Atropos server without keys."""
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client
