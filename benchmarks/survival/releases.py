"""An upgrade under load: the previous release's gateways beside those of this one, at a pool of either release."""

import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from rig.fake_engine import FakeEngine
from rig.gateways import gateway_process
from rig.ray_nodes import RayNodes, ray_nodes
from rig.threads import in_thread
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import RayLink

PREVIOUS = "7059718d"
"""The first commit with the journal of 0.3, which refuses those of before; from it on, releases can be mixed."""
CHECKOUT = Path(__file__).parents[2]
SECONDS, AGENTS = 20.0, 6
"""Of load at each pool, and for each gateway."""
KILL_SHARDS = """
import sys, ray
address, *shards = sys.argv[1:]
ray.init(address=address, namespace="default", log_to_driver=False)
for shard in shards:
    ray.kill(ray.get_actor(shard))
"""
SHARDS = 2


@dataclass(frozen=True, slots=True)
class UpgradedCluster:
    nodes: RayNodes
    folder: Path
    old: dict[str, str]
    """The environment of a process that runs the previous release."""
    gateways: dict[str, str]
    """URLs by release."""

    async def create_pool(self, env: dict[str, str], resource: str) -> None:
        flags = ["--name", POOL, "--shards", str(SHARDS), "--journal", str(self.folder / "journal")]
        await self._run(["-m", "stepwell", "pool", *flags, "--resource", resource], env)

    async def end_pool(self) -> None:
        names = [POOL, *(f"{POOL}-{n}" for n in range(1, SHARDS))]
        line = [sys.executable, "-c", KILL_SHARDS, self.nodes.address, *names]
        await asyncio.to_thread(subprocess.run, line, check=True, timeout=60)

    async def _run(self, words: list[str], env: dict[str, str]) -> None:
        line = [sys.executable, *words, "--ray-address", self.nodes.address]
        await asyncio.to_thread(subprocess.run, line, env={**os.environ, **env}, check=True, timeout=120)


class MixedReleases:
    """Agents stay at one gateway: that several gateways share a rollout is new in this release."""

    name = "releases"
    fault = f"gateways of {PREVIOUS} and of today at a pool of {PREVIOUS}, which is then upgraded under load"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        seconds, agents = (3.0, 2) if quick else (SECONDS, AGENTS)
        async with _upgraded_cluster() as cluster:
            await cluster.create_pool(cluster.old, "old")
            loads = {release: AgentLoad([url], auditor) for release, url in cluster.gateways.items()}
            working = [asyncio.create_task(load.run(agents)) for load in loads.values()]
            await asyncio.sleep(seconds)
            before = set(auditor.completed)
            await cluster.end_pool()
            await cluster.create_pool({}, "new")
            await asyncio.sleep(seconds)
            for load in loads.values():
                load.stopped.set()
            await asyncio.gather(*working)
            refused = await _drain(cluster, auditor)
        sent_again = refused.pop(SubmitVerdict.DUPLICATE, 0)
        figures = auditor.figures() | {"refused_steps": refused.total(), "steps_sent_again": sent_again}
        for release, load in loads.items():
            figures[f"{release}_gateway_old_pool"] = len(load.uids & before)
            figures[f"{release}_gateway_new_pool"] = len(load.uids & auditor.completed - before)
        rollouts = {name: 1.0 for name in figures if "_gateway_" in name}
        return RowOutcome(figures, {**NOTHING_LOST, "refused_steps": 0}, {"answered_percent": 100.0, **rollouts})


@asynccontextmanager
async def _upgraded_cluster() -> AsyncIterator[UpgradedCluster]:
    """One node runs the code of the previous release, another one that of today; so does one gateway each."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = stack.enter_context(previous_release())
        old = {"PYTHONPATH": str(source / "src")}
        engine = stack.enter_context(in_thread(FakeEngine()))
        ray = await asyncio.to_thread(stack.enter_context, ray_nodes())
        await asyncio.to_thread(ray.add_node, resources={"old": 1}, env_vars=old)
        await asyncio.to_thread(ray.add_node, resources={"new": 1})
        gateways = {
            release: stack.enter_context(
                gateway_process(
                    folder / f"{release}.log",
                    env=env,
                    data_pool_name=POOL,
                    vllm_addresses=engine.url,
                    tokenizer_path="no/such/folder",
                    ray_address=ray.address,
                    spool=folder / f"{release}.spool",
                )
            ).url
            for release, env in (("old", old), ("new", {}))
        }
        yield UpgradedCluster(ray, folder, old, gateways)


@contextmanager
def previous_release() -> Iterator[Path]:
    """Its source, from the history of this checkout."""
    packed = subprocess.run(["git", "archive", PREVIOUS, "src"], cwd=CHECKOUT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


async def _drain(cluster: UpgradedCluster, auditor: Auditor) -> Counter[str]:
    """Returns how many steps the pool has refused since its upgrade, by cause. Duplicates are steps whose
    acknowledgement was lost with the old shards."""
    link = RayLink(cluster.nodes.address, "default")
    await asyncio.to_thread(link.start)
    try:
        pool = PoolClient(POOL, transport=link)
        await auditor.drain(pool)
        return Counter((await pool.stats()).refused)
    finally:
        await link.close()
