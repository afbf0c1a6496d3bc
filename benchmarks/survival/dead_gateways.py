"""Gateways are killed one after the other while agents work: which rollouts lack a call, and which of them are marked?

Each call goes to one of the gateways at random. A gateway dies just after an agent has read an answer of it, so that it
may still hold the step. Once it has no spool, and a new gateway takes its place; once its steps are on a disk, and it
is back with them some time later. The pool is read, and trained, after all agents have ended.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from benchmarks.survival.cluster import SurvivalCluster, survival_cluster
from benchmarks.survival.live_kills import until
from benchmarks.survival.retrying_agents import RetryingAgents, answer_uniquely
from benchmarks.survival.row import RowOutcome
from benchmarks.survival.text_trainer import all_trained, text_trainer
from rig.texts import texts_of
from stepwell.pool.api.watching import Cursor, TrajectorySnapshot
from stepwell.steps.columns import unpack
from stepwell.steps.trainable import INCOMPLETE

GATEWAYS, SHARDS = 4, 2
FEWEST = 3
"""Gateways that run when one of them is killed."""
MOST_MARKED = 1.0
"""Percent of the rollouts that are marked and lack nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    rollouts: int
    agents: int
    calls: tuple[int, int]
    pause: float
    interval: float
    """Seconds between two kills."""
    absence: float
    """Seconds until a gateway with a spool is started again."""


FULL = Extent(rollouts=1_000, agents=50, calls=(3, 8), pause=2.0, interval=30.0, absence=60.0)
QUICK = Extent(rollouts=60, agents=20, calls=(3, 8), pause=2.0, interval=15.0, absence=15.0)
"""The interval is no shorter than a pool needs to take a silent gateway for dead: else no rollout would end."""


@dataclass(frozen=True, slots=True)
class Rollout:
    read: Sequence[str]
    """The answers that the agent has read."""
    held: Sequence[str]
    """Those of them that are in the pool at the end, and others."""
    trained: Sequence[str]
    is_marked: bool

    @property
    def is_truncated(self) -> bool:
        return bool(Counter(self.read) - Counter(self.trained))

    @property
    def is_whole(self) -> bool:
        return not Counter(self.read) - Counter(self.held)


class DeadGateways:
    name = "dead_gateways"
    fault = (
        "1,000 rollouts over 4 gateways, one killed every 30 s; without a spool, and with one that is back after 60 s"
    )

    async def run(self, *, quick: bool) -> RowOutcome:
        extent = QUICK if quick else FULL
        figures, most = dict[str, float](), dict[str, float]()
        for name, has_spool in (("no_spool", False), ("spool", True)):
            found = await _run(extent, has_spool=has_spool)
            print(f"{name}: {found}", flush=True)
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
            most |= {f"{name}_truncated_unmarked": 0, f"{name}_needless_percent": MOST_MARKED, f"{name}_unanswered": 0}
        return RowOutcome(figures, most, {f"{name}_kills": 1 for name in ("no_spool", "spool")})


async def _run(extent: Extent, *, has_spool: bool) -> dict[str, float]:
    flags = {} if has_spool else {"spool": None}
    async with survival_cluster(gateways=GATEWAYS, shards=SHARDS, gateway_flags=flags) as cluster:
        answer_uniquely(cluster.engine)
        killer = GatewayKiller(cluster, extent.interval, extent.absence if has_spool else 0.0)
        agents = RetryingAgents(killer.urls, has_keys=False, calls=extent.calls, pause=extent.pause)
        killing = asyncio.create_task(killer.run(agents))
        await agents.run(extent.agents, extent.rollouts)
        killing.cancel()
        with suppress(asyncio.CancelledError):
            await killing
        await killer.all_back()
        await until(partial(_all_delivered, cluster), "the gateways' steps to arrive")
        held, marked = await held_texts(cluster, agents.prompts), await marked_incomplete(cluster)
        with text_trainer(cluster) as file:
            trained = await all_trained(cluster, file)
        left_out = (await cluster.pool.stats()).channels["train"].left_out
    rollouts = [
        Rollout(agents.read[uid], held.get(uid, ()), trained.get(uid, ()), uid in marked) for uid in agents.prompts
    ]
    needless = sum(rollout.is_marked and rollout.is_whole for rollout in rollouts)
    return {
        "kills": killer.kills,
        "rollouts": len(rollouts),
        "read": sum(len(rollout.read) for rollout in rollouts),
        "unanswered": agents.unanswered,
        "truncated_unmarked": sum(rollout.is_truncated and not rollout.is_marked for rollout in rollouts),
        "marked": len(marked),
        "needless_percent": round(100 * needless / len(rollouts), 2),
        "steps_left_out": sum(count.steps for kind, count in left_out.items() if kind == INCOMPLETE),
    }


async def _all_delivered(cluster: SurvivalCluster) -> bool:
    return not await cluster.reading("stepwell_waiting_steps")


class GatewayKiller:
    """Kills them in turn, and starts each again."""

    def __init__(self, cluster: SurvivalCluster, interval: float, absence: float) -> None:
        self.urls = list(cluster.urls)
        """Also of those that do not run."""
        self.kills = 0
        self._cluster = cluster
        self._interval = interval
        self._absence = absence
        self._starting: dict[int, asyncio.Task[None]] = {}

    async def run(self, agents: RetryingAgents) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if GATEWAYS - len(self._starting) < FEWEST:
                continue
            async with agents.on_read:
                await agents.on_read.wait()
                index = self.urls.index(agents.last_read)
                self._cluster.gateways[index].kill()
            self.kills += 1
            self._starting[index] = asyncio.create_task(self._start_again(index))

    async def all_back(self) -> None:
        await asyncio.gather(*self._starting.values())

    async def _start_again(self, index: int) -> None:
        await asyncio.sleep(self._absence)
        await asyncio.to_thread(self._cluster.fleet.start_again, index)
        del self._starting[index]


async def held_texts(cluster: SurvivalCluster, prompts: Mapping[str, str]) -> dict[str, list[str]]:
    """What the pool holds of these trajectories."""
    held = defaultdict(list)
    for uid, text in texts_of(unpack(await cluster.pool.read(list(prompts.items())), copy=False)):
        held[uid].append(text)
    return held


async def marked_incomplete(cluster: SurvivalCluster) -> set[str]:
    """The trajectories that the pool leaves out because a gateway that died may have had a call of theirs."""
    cursors: Mapping[str, Cursor] = {}
    found: dict[str, TrajectorySnapshot] = {}
    while True:
        changes = await cluster.pool.changes(cursors)
        found |= {snapshot.trajectory_uid: snapshot for snapshot in changes.snapshots}
        cursors = changes.cursors
        if not changes.more and not changes.missing:
            return {uid for uid, snapshot in found.items() if snapshot.note.startswith(INCOMPLETE)}
