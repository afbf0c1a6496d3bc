"""The two commands in the test's own process, on a real pool."""

from pathlib import Path
from typing import Any

from stepwell.pool.actors import start_pool

from stepwell.commands.export import ExportSettings, ImportSettings, export_steps, import_steps
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import PoolClient


def new_pool(name: str, namespace: str, shards: int = 2, **limits: Any) -> PoolClient:
    start_pool(PoolPlan(name=name, shards=shards, limits=Limits(**limits)), namespace)
    return PoolClient(name, namespace)


async def export(pool: PoolClient | None, to: Path, **settings: Any) -> list[str]:
    """What it said."""
    said: list[str] = []
    await export_steps(ExportSettings(to=str(to), **settings), pool, None, said.append)
    return said


async def import_into(pool: PoolClient, path: Path, **settings: Any) -> list[str]:
    said: list[str] = []
    await import_steps(ImportSettings(path=str(path), **settings), pool, said.append)
    return said
