from collections.abc import AsyncIterator

import httpx
import pytest

from tests.integration.dashboard.looking import known
from tests.rig.sight import MemorySight, serve_dashboard


@pytest.fixture
def sight() -> MemorySight:
    return MemorySight(trajectories=400)


@pytest.fixture
async def client(sight: MemorySight) -> AsyncIterator[httpx.AsyncClient]:
    """Of a dashboard that is open to all and has read all but the texts."""
    async with serve_dashboard(sight) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        await known(client, trajectories=400)
        yield client
