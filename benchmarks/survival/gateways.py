"""Several gateways behind one address: each request of a rollout goes to a random one."""

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL_NODE, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome

GATEWAYS, AGENTS, ROLLOUTS = 4, 20, 50


class SeveralGateways:
    name = "gateways"
    fault = "4 gateways, a random one per request, 1,000 rollouts of 1 to 6 calls"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        gateways, nodes, agents, rollouts = (2, 1, 5, 4) if quick else (GATEWAYS, 2, AGENTS, ROLLOUTS)
        async with survival_cluster(gateways=gateways, shards=2, nodes=[POOL_NODE] * nodes) as cluster:
            await AgentLoad(cluster.urls, auditor, pause=0.0).run(agents, rollouts)
            await auditor.drain(cluster.pool)
        return RowOutcome(auditor.figures(), NOTHING_LOST, {"answered_percent": 100.0})
