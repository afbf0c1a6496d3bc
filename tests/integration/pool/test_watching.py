"""A real pool of two shards, watched and curated: what people decide holds for every later batch, over kills too."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from rig.actors import pid_of
from rig.builders import make_step
from rig.ray_cluster import RayCluster
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import Layout, Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.slices.curation import Curation, CurationAction, CurationOutcome
from tests.integration.pool.conftest import started

GROUPS = [f"p{n}" for n in range(6)]
"""On both shards."""


@pytest.fixture
def plan(tmp_path: Path) -> PoolPlan:
    return PoolPlan(shards=2, limits=Limits(group_size=2, history_size=20), journal=str(tmp_path))


@pytest.fixture
def client(plan: PoolPlan, namespace: str) -> PoolClient:
    assert {Layout(1, 2).owner(prompt) for prompt in GROUPS} == {0, 1}
    return started(plan, namespace)


async def fill(client: PoolClient, prompts: list[str] = GROUPS) -> None:
    """Groups of two, `a-PROMPT` and `b-PROMPT`."""
    for uid, prompt in ((f"{side}-{prompt}", prompt) for prompt in prompts for side in "ab"):
        await client.register_trajectory(Registration(uid, prompt))
        assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
        assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


async def reject(client: PoolClient, uid: str) -> CurationOutcome:
    prompt = uid.split("-")[1]
    return await client.curate(
        Curation(action=CurationAction.REJECT, trajectory_uid=uid, prompt_uid=prompt, by="ana", why="wrong")
    )


async def test_what_was_decided_survives_the_shards_being_killed(
    client: PoolClient, plan: PoolPlan, namespace: str
) -> None:
    began = time.time()
    await fill(client)
    leased = await client.fetch_batch(2, lease=300.0)
    under_lease = leased.columns.trajectory_uids[0]
    queued = next(f"a-{prompt}" for prompt in GROUPS if prompt not in leased.columns.prompt_uids)
    assert [await reject(client, uid) for uid in (under_lease, queued)] == [CurationOutcome.DONE] * 2
    known = await client.changes({})
    for shard in plan.shard_names():
        os.kill(pid_of(shard, namespace), signal.SIGKILL)
    assert [await reject(client, uid) for uid in (under_lease, queued)] == [CurationOutcome.UNCHANGED] * 2
    told: set[str] = set()
    async with asyncio.timeout(60):  # a watcher is told that the shards began anew, by each when it is back
        while told != set(plan.shard_names()):
            told.update((await client.changes(known.cursors)).reset_shards)
    await client.nack(leased)
    batch = await client.fetch_batch(6)
    assert len(batch.columns) == 10
    assert not {under_lease, queued} & set(batch.columns.trajectory_uids)
    trail = (await client.audit()).entries
    assert [(entry.by, entry.why, entry.outcome) for entry in trail[-2:]] == [
        ("ana", "wrong", CurationOutcome.DONE)
    ] * 2
    assert all(began <= entry.at <= time.time() for entry in trail)
    assert [entry.outcome for entry in (await client.audit(1, queued)).entries] == [CurationOutcome.UNCHANGED]


async def test_the_snippet_of_the_page_rejects_a_trajectory(client: PoolClient) -> None:
    await client.register_trajectory(Registration("t-17", "p-4"))
    page = (Path(__file__).parents[3] / "docs" / "pool.md").read_text()
    snippet = page.split("## Curation")[1].split("```python")[1].split("```")[0]
    await asyncio.to_thread(exec, snippet, {"pool": DataPool(client)})
    assert [(entry.by, entry.outcome) for entry in (await client.audit(1, "t-17")).entries] == [
        ("ana", CurationOutcome.DONE)
    ]


async def test_whoever_watches_a_pool_that_is_missing_is_told_so(ray_cluster: RayCluster) -> None:
    nowhere = PoolClient("nowhere", "empty")
    with pytest.raises(PoolUnavailable, match="no DataPool named 'nowhere'"):
        await nowhere.changes({})
