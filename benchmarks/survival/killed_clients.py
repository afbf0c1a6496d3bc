"""Trainers, Atropos servers and reward workers are killed at random moments, while agents and an environment work."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import SurvivalCluster, survival_cluster
from benchmarks.survival.full_disk import seconds_until
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from benchmarks.survival.trainer_process import CountedSteps, read_counts
from rig.atropos.server import atropos_process, scored_group
from rig.gateways import GatewayProcess, free_port

KILLS = {"trainer": 34, "door": 33, "reward_worker": 33}
LIFE = 0.0, 1.5
"""Seconds that a process works until it is killed, at least and at most."""
AGENTS, SHARDS, WORKERS = 6, 2, 2
FIRST_GROUP = 1_000_000
"""The first token of the environment's first group. No agent's prompt begins with such a token."""
PAUSE = 0.1
"""Seconds between two groups of the environment."""
PATIENCE = 90.0
"""Seconds without progress after which what is not trained counts as lost."""
GOAL = 15.0
REWARD = "def score(sample):\n    return 1.0\n"
WORKER = b"ray::RewardLoopWorker"


@dataclass(slots=True)
class Environment:
    """Sends one group after the other, each until it is confirmed."""

    url: str
    sent: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            is_taken = False
            while not (self.stopped.is_set() and is_taken):
                is_taken = await self._is_taken(http, scored_group(FIRST_GROUP + self.sent))
                self.sent += is_taken
                await asyncio.sleep(PAUSE)

    async def _is_taken(self, http: aiohttp.ClientSession, group: dict[str, Any]) -> bool:
        try:
            async with http.post(f"{self.url}/scored_data", json=group) as answer:
                await answer.read()
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


class KilledClients:
    name = "killed_clients"
    fault = "trainer, Atropos server and reward workers killed at 100 random moments"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        kills = dict.fromkeys(KILLS, 2) if quick else KILLS
        async with survival_cluster(shards=SHARDS, require_reward=True) as cluster:
            function = cluster.folder / "reward.py"
            function.write_text(REWARD)
            await asyncio.to_thread(_start_rewards, cluster, function)
            environment = Environment(f"http://127.0.0.1:{free_port()}")
            load = AgentLoad(cluster.urls, auditor, reward=None)
            trainer = TrainerProcess(cluster)
            tasks = [asyncio.create_task(load.run(AGENTS)), asyncio.create_task(environment.run())]
            async with trainer.running_at_the_end():
                await asyncio.gather(
                    trainer.kill(kills["trainer"]),
                    _kill_door(cluster, environment, kills["door"]),
                    _kill_workers(cluster, kills["reward_worker"]),
                )
                trainer.start()
                async with _door(cluster, environment):
                    load.stopped.set()
                    environment.stopped.set()
                    await asyncio.gather(*tasks)
                counts = await trainer.finish(auditor, environment.sent)
            lease_back = await _lease_back(cluster)
            scored = (await cluster.pool.stats()).scoring.scored
        return _outcome(auditor, counts, environment.sent, lease_back, scored, sum(kills.values()))


def _outcome(
    auditor: Auditor, counts: CountedSteps, groups: int, lease_back: float, scored: int, kills: int
) -> RowOutcome:
    _count(auditor, counts)
    trained = Counter(tuple(first) for _, _, first in counts.trained if first[0] >= FIRST_GROUP)
    figures = auditor.figures() | {
        "kills": kills,
        "groups_sent": groups,
        "groups_lost": 2 * groups - len(trained),
        "groups_twice": sum(count - 1 for count in trained.values()),
        "scored": scored,
        "lease_back_s": round(lease_back, 1),
    }
    most = {**NOTHING_LOST, "groups_lost": 0, "groups_twice": 0, "lease_back_s": GOAL}
    return RowOutcome(figures, most, {"answered_percent": 100.0})


def _count(auditor: Auditor, counts: CountedSteps) -> None:
    auditor.delivered = Counter(trajectory for trajectory, _, _ in counts.trained)
    auditor.uids = Counter(step for _, step, first in counts.trained if first[0] < FIRST_GROUP)


class TrainerProcess:
    def __init__(self, cluster: SurvivalCluster) -> None:
        self._cluster = cluster
        self._process: subprocess.Popen[str] | None = None

    def start(self, *mode: str) -> None:
        command = [sys.executable, "-m", "benchmarks.survival.trainer_process"]
        arguments = [self._cluster.nodes.address, str(self._cluster.folder), *mode]
        with (self._cluster.folder / "trainer.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True)

    async def works(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line == "works\n", f"the trainer ended: {line!r}"

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def kill(self, times: int) -> None:
        for _ in range(times):
            self.start()
            await self.works()
            await asyncio.sleep(random.uniform(*LIFE))
            self.end()

    @asynccontextmanager
    async def running_at_the_end(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.end()

    async def finish(self, auditor: Auditor, groups: int) -> CountedSteps:
        """Until everything is trained, or nothing more is."""
        counts, changed_at = CountedSteps(), time.monotonic()
        while time.monotonic() - changed_at < PATIENCE:
            await asyncio.sleep(0.5)
            found = await asyncio.to_thread(read_counts, self._cluster.folder)
            if len(found.trained) > len(counts.trained):
                counts, changed_at = found, time.monotonic()
            trained = {(trajectory, step) for trajectory, step, _ in counts.trained}
            if len(trained) >= auditor.answered.total() + 2 * groups:
                break
        return counts


async def _lease_back(cluster: SurvivalCluster) -> float:
    """Seconds from the kill of a trainer that has a batch until all of it is back."""
    await AgentLoad(cluster.urls, Auditor(), reward=None).run(AGENTS, rollouts=2)
    trainer = TrainerProcess(cluster)
    trainer.start("hold")
    await trainer.works()
    held = (await cluster.pool.stats()).leases
    trainer.end()

    async def is_back() -> bool:
        return (await cluster.pool.stats()).leases == 0

    return await seconds_until(is_back, PATIENCE) if held else float("inf")


@asynccontextmanager
async def _door(cluster: SurvivalCluster, environment: Environment) -> AsyncIterator[GatewayProcess]:
    port = int(environment.url.rpartition(":")[2])
    with ExitStack() as stack:
        door = atropos_process(cluster.folder / "door.log", port=port, ray_address=cluster.nodes.address)
        yield await asyncio.to_thread(stack.enter_context, door)


async def _kill_door(cluster: SurvivalCluster, environment: Environment, times: int) -> None:
    for _ in range(times):
        async with _door(cluster, environment) as server:
            await asyncio.sleep(random.uniform(*LIFE))
            server.kill()


def _start_rewards(cluster: SurvivalCluster, function: Path) -> None:
    cluster.nodes.run("rewards", function=f"{function}:score", workers=WORKERS, cpus=0, timeout=1)


async def _kill_workers(cluster: SurvivalCluster, times: int) -> None:
    killed = 0
    while killed < times:
        await asyncio.sleep(random.uniform(*LIFE))
        if workers := _workers(cluster):
            os.kill(random.choice(workers), signal.SIGKILL)
            killed += 1


def _workers(cluster: SurvivalCluster) -> list[int]:
    """The processes of the reward workers of this cluster."""
    raylets = cluster.nodes.raylets()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(WORKER) and _parent(process) in raylets:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def _parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])
