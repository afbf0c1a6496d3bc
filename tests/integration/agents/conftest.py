from collections.abc import AsyncIterator

import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool


@pytest.fixture
async def gateway(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[str]:
    async with serve_gateway(pool, [engine.url], prompt_length=8192, response_length=256) as url:
        yield url
