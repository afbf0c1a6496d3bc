"""Hostile requests to every HTTP surface: whatever comes is answered, with a reason, and never with an unmeant 5xx.

6,000, always the same. `python -m benchmarks.survival --only hostile` sends 100,000 to real processes.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rig.atropos.server import serve_atropos
from rig.dashboard import MadeUpPool, serve_dashboard
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.hostile.attack import HostileSurface
from rig.hostile.surfaces import atropos_surface, dashboard_surface, gateway_surface
from rig.local_pool import LocalPool
from rig.vocabulary import pieces
from stepwell.pool.api.scoring import RewardRequest, RewardScore

CONTROL = "control-key-of-the-tests"
REQUESTS = 2_000


class Words:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(pieces([token for token in ids if token < 256]))


class Scorer:
    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        return RewardScore(float(len(request.response_text)), {})

    async def check(self) -> None:
        return


@asynccontextmanager
async def a_gateway() -> AsyncIterator[HostileSurface]:
    rig: dict[str, Any] = {"control_keys": [CONTROL], "rewards": Scorer(), "load_tokenizer": lambda _: Words()}
    async with FakeEngine() as engine, serve_gateway(LocalPool(shards=2), [engine.url], **rig) as url:
        yield await gateway_surface(url, CONTROL, may_fail={})


@asynccontextmanager
async def an_atropos_server() -> AsyncIterator[HostileSurface]:
    async with serve_atropos(LocalPool(shards=2), control_keys=[CONTROL]) as url:
        yield atropos_surface(url, CONTROL)


@asynccontextmanager
async def a_dashboard() -> AsyncIterator[HostileSurface]:
    async with serve_dashboard(MadeUpPool(), control_keys=[CONTROL]) as url:
        yield dashboard_surface(url, CONTROL)


@pytest.mark.parametrize("serve", [a_gateway, an_atropos_server, a_dashboard])
async def test_no_hostile_request_gets_an_unmeant_5xx_hangs_or_loses_its_connection(
    serve: Callable[[], AbstractAsyncContextManager[HostileSurface]],
) -> None:
    async with serve() as surface:
        report = await surface.attack(REQUESTS)
        assert not report.faults, "\n\n".join(report.examples)
        assert sum(report.statuses.values()) > 0.95 * REQUESTS, "the others were no HTTP"
        assert report.answered > REQUESTS // 5, f"most were refused at the door: {report.statuses}"
        async with aiohttp.ClientSession() as http, http.get(f"{surface.url}/health") as answer:
            assert answer.status == 200
