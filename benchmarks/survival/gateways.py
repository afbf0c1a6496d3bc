"""Several gateways behind one address: each request of a rollout goes to a random one."""

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL_NODE, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome

GATEWAYS, SHARDS = 4, 2
AGENTS, ROLLOUTS = 20, 50
"""Each agent makes so many rollouts."""


class SeveralGateways:
    name = "gateways"
    fault = "4 gateways, a random one per request, 1,000 rollouts of 1 to 6 calls"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        gateways, shards, agents, rollouts = (2, 1, 10, 6) if quick else (GATEWAYS, SHARDS, AGENTS, ROLLOUTS)
        async with survival_cluster(gateways=gateways, shards=shards, nodes=[POOL_NODE] * shards) as cluster:
            await AgentLoad(cluster.urls, auditor, pause=0.0).run(agents, rollouts)
            await auditor.drain(cluster.pool)
        return RowOutcome(auditor.figures(), NOTHING_LOST, {"answered_percent": 100.0})
