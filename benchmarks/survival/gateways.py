"""Several gateways behind one address: each request of a rollout goes to a random one."""

from benchmarks.survival.auditor import Auditor
from benchmarks.survival.cluster import survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome

GATEWAYS, AGENTS = 4, 20


class SeveralGateways:
    name = "gateways"
    fault = "4 gateways, a random one per request, 1,000 rollouts of 1 to 6 calls"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        gateways, agents, rollouts = (2, 5, 4) if quick else (GATEWAYS, AGENTS, 50)
        async with survival_cluster(gateways=gateways, shards=1 if quick else 2) as cluster:
            await AgentLoad(cluster.urls, auditor, pause=0.0).run(agents, rollouts)
            await auditor.drain(cluster.pool)
        nothing = ("empty_rollouts", "truncated_rollouts", "steps_lost", "steps_twice")
        return RowOutcome(auditor.figures(), dict.fromkeys(nothing, 0), {"answered_percent": 100.0})
