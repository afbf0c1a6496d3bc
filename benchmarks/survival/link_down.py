"""The network between one shard and everything else is cut for a while. The other shards go on as before."""

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

from stepwell.pool.shard.journal_store import JournalIdentity

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL, SurvivalCluster, logs_of_failure, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from rig.network_namespace import NetworkNamespace, network_namespace
from rig.ray_node_process import ray_node_process
from rig.ray_nodes import ray_nodes
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.shard.sqlite_journal import SqliteJournal

SHARDS, GATEWAYS = 4, 2
SHARD_NAMES = PoolPlan(name=POOL, shards=SHARDS).shard_names()
WITH_OTHER_FOLDER = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
"""A command line of the shell: `ip netns exec` has mounts of its own."""
AGENTS = 8
"""For the shard that is cut off, and as many for the others."""
AROUND = 5.0
"""Seconds of load before the fault, and after it."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    away: float
    """Seconds."""

    @property
    def name(self) -> str:
        return f"link_down_{self.away:g}s"

    @property
    def fault(self) -> str:
        return f"no network for {self.away:g} s between the gateways and one of 4 shards"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor, agents = Auditor(), 2 if quick else AGENTS
        async with cluster_with_link() as (cluster, namespace):
            there = SHARD_NAMES[-1]
            find = await cluster.pool.shard_finder()
            others = AgentLoad(cluster.urls, auditor, next_prompt=_prompts(lambda uid: find(uid) != there))
            cut_off = AgentLoad(cluster.urls, auditor, next_prompt=_prompts(lambda uid: find(uid) == there))
            training = asyncio.create_task(auditor.follow(cluster.pool))
            working = [asyncio.create_task(load.run(agents)) for load in (others, cut_off)]
            await asyncio.sleep(AROUND)
            namespace.cut()
            await asyncio.sleep(min(self.away, 5.0) if quick else self.away)
            namespace.mend()
            mended_at = time.monotonic()
            await asyncio.sleep(AROUND)
            for load in (others, cut_off):
                load.stopped.set()
            await asyncio.gather(*working)
            await auditor.drain(cluster.pool)
            await training
        arrivals = [at for uid, at in auditor.arrived_at.items() if uid in cut_off.uids and at > mended_at]
        measured = {
            "others_p99_delivery_s": auditor.delivery_p99(others.uids),
            "others_rollouts": len(auditor.completed & others.uids),
            "resumed_s": round(min(arrivals, default=math.inf) - mended_at, 1),
        }
        return RowOutcome(auditor.figures() | measured, {"others_p99_delivery_s": 1.0, **NOTHING_LOST})


@asynccontextmanager
async def cluster_with_link() -> AsyncIterator[tuple[SurvivalCluster, NetworkNamespace]]:
    """The last shard is in a network namespace, on a node of its own that has its journal, and the others are not."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(logs_of_failure(folder))
        namespace = stack.enter_context(network_namespace())
        here, there = make_journals(folder)
        ray = await asyncio.to_thread(stack.enter_context, ray_nodes(host=namespace.outside))
        prefix = namespace.command("sh", "-c", WITH_OTHER_FOLDER, "sh", str(there), str(here))
        params = ray.node_params(node_ip_address=namespace.inside)
        node = ray_node_process(prefix, ray.settings, params, folder / "node.log")
        await asyncio.to_thread(stack.enter_context, node)
        cluster = survival_cluster(ray=ray, gateways=GATEWAYS, shards=SHARDS, nodes=(), journal=here, resource=None)
        yield await stack.enter_async_context(cluster), namespace


def make_journals(folder: Path) -> tuple[Path, Path]:
    """Empty journals of one pool. The last one is in a folder that only its node sees, in place of the other folder."""
    here, there, uid = folder / "journal", folder / "journal-there", uuid4().hex
    for index, name in enumerate(SHARD_NAMES):
        at = there if name == SHARD_NAMES[-1] else here
        at.mkdir(exist_ok=True)
        identity = JournalIdentity(pool=POOL, pool_uid=uid, shards=SHARDS, index=index)
        SqliteJournal(at / f"{name}.sqlite", identity, closed_kept=PoolPlan().limits.closed_kept).close()
    return here, there


def _prompts(is_wanted: Callable[[str], bool]) -> Callable[[], str]:
    uids = filter(is_wanted, (f"p{number}" for number in count()))
    return lambda: next(uids)
