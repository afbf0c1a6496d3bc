from collections.abc import AsyncIterator

import httpx
import pytest

from rig.dashboard import MadeUpPool, serve_dashboard
from tests.integration.dashboard.client import known


@pytest.fixture
def pool() -> MadeUpPool:
    return MadeUpPool(trajectories=400)


@pytest.fixture
async def client(pool: MadeUpPool) -> AsyncIterator[httpx.AsyncClient]:
    """Of a dashboard that is open to all and has read all but the texts."""
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        await known(client, trajectories=400)
        yield client
