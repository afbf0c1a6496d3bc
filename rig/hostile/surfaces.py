"""The HTTP surfaces of Stepwell as targets of hostile requests."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rig.dashboard import MadeUpPool, make_dashboard
from rig.hostile.attack import HostileSurface
from rig.hostile.json_values import Json
from rig.hostile.operations import atropos_operations, openapi_operations

NOWHERE = "http://127.0.0.1:9"
NAMED: Mapping[str, Sequence[Json]] = {"model": ("tiny",), "address": (NOWHERE,)}
"""Requests name the engine's model, and no engine out in the world is added."""
NO_REWARDS = {"/compute_reward": (503,)}
"""Without a reward worker."""


async def gateway_surface(url: str, key: str, may_fail: Mapping[str, tuple[int, ...]] = NO_REWARDS) -> HostileSurface:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        async with http.get(f"{url}/openapi.json") as answer:
            document: dict[str, Any] = await answer.json()
        async with http.post(f"{url}/init_trajectory", json={}) as answer:
            agent_key: str = (await answer.json())["api_key"]
    operations = openapi_operations(document, random.Random(0), NAMED)
    return HostileSurface("gateway", url, operations, (key, agent_key, "wrong", ""), may_fail)


def atropos_surface(url: str, key: str) -> HostileSurface:
    return HostileSurface("atropos", url, atropos_operations(), (key, "wrong", ""))


def dashboard_surface(url: str, key: str) -> HostileSurface:
    document = make_dashboard(MadeUpPool(0)).openapi()
    return HostileSurface("dashboard", url, openapi_operations(document, random.Random(0), {}), (key, "wrong", ""))
