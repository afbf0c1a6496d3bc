"""Everything is killed at random for an hour under load: is something lost, is something trained twice, does it leak?

One gateway and one shard are never killed: memory and file descriptors of a process that is killed every few minutes
would show nothing.
"""

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import aiohttp

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from benchmarks.survival.soak_trainer import TrainedStep, TrainerRecord, describe, read_record
from rig.atropos.server import atropos_process, scored_group
from rig.gateways import GatewayProcess, free_port
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step, ids_array

MINUTES = 60.0
GATEWAYS, SHARDS = 3, 3
"""The last gateway and the first shard are the witnesses."""
AGENTS, PAUSE = 28, 0.25
GROUP, GROUPS_A_SECOND = 4, 2.5
"""Sequences in a group that the environment sends, and how many groups."""
KILL_PAUSE = (4.0, 12.0)
"""Seconds from the end of one kill to the next. Each costs two slow cores some seconds of starting, and 50 steps/s must
find room beside that."""
KILL_TIMEOUT = 300.0
"""Seconds for one kill and, of what does not restart by itself, the start that follows."""
PROGRESS_INTERVAL = 60.0
SAMPLE_INTERVAL = 2.0
LEASE_TIMEOUT = 60.0
WARM_UP = 0.25
"""The share of the time after which memory and file descriptors are measured."""
SLOPE_MINUTES = 30.0
"""Shorter runs cannot tell two percent in an hour from noise, and only show the figure."""
REWARD = "def score(sample):\n    return 1.0\n"
DOOR = "door-"
FILL, FILL_MESSAGE = "fill", 3000
"""The channel of trajectories that are remembered from the beginning, and how many come in a message."""


class SoakAuditor(Auditor):
    """Knows the environment's sequences by their first token, and what trainers wrote down that were killed."""

    def note_delivered(self, steps: Iterable[Step], at: float = 0.0) -> None:
        self.note_trained(map(describe, steps))

    def note_trained(self, steps: Iterable[TrainedStep]) -> None:
        for step in steps:
            self.delivered[_rollout_of(step)] += 1
            self.uids[step.uid] += 1

    async def settle(self, pool: PoolClient, record: TrainerRecord) -> None:
        """Take what is left. What a killed trainer has perhaps acknowledged counts, unless it comes again."""
        self.note_trained(record.trained)
        self.leases_lost += record.leases_lost
        self.delivered.update(map(_rollout_of, record.perhaps))
        await self.drain(pool)
        self.delivered.subtract(_rollout_of(step) for step in record.perhaps if self.uids[step.uid])

    @property
    def groups_twice(self) -> int:
        """Sequences of the environment that came under several names."""
        return sum(max(0, count - GROUP) for uid, count in self.delivered.items() if uid.startswith(DOOR))


@dataclass(slots=True)
class Witness:
    """Memory and file descriptors of processes that are not killed."""

    pids: list[int]
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, bytes resident, file descriptors."""

    async def watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(SAMPLE_INTERVAL)

    def _look(self) -> None:
        memory = sum(int(_read(pid, "statm").split()[1]) * 4096 for pid in self.pids)
        descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)
        self.samples.append((time.monotonic(), memory, descriptors))

    def figures(self) -> dict[str, float]:
        warm = self.samples[int(len(self.samples) * WARM_UP) :]
        times, memory, descriptors = zip(*warm, strict=True)
        slope, _ = statistics.linear_regression(times, memory)
        half = len(warm) // 2
        return {
            "witness_mb": round(statistics.mean(memory) / 1e6),
            "memory_percent_per_h": round(100 * slope * 3600 / statistics.mean(memory), 1),
            "descriptors": statistics.median(descriptors),
            "descriptors_grown": statistics.median(descriptors[half:]) - statistics.median(descriptors[:half]),
        }


@dataclass(slots=True)
class Environment:
    """Sends groups to the Atropos server, each until it is taken."""

    auditor: Auditor
    port: int
    sent: int = 0

    async def run(self, stopped: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as http:
            while not stopped.is_set():
                await self._send(http, self.sent)
                self.sent += 1
                await asyncio.sleep(1 / GROUPS_A_SECOND)

    async def _send(self, http: aiohttp.ClientSession, number: int) -> None:
        uid = f"{DOOR}{number}"
        while True:
            try:
                async with http.post(
                    f"http://127.0.0.1:{self.port}/scored_data",
                    json=scored_group(number, GROUP),
                    headers={"Idempotency-Key": uid},
                ) as answer:
                    if answer.status == 200:
                        self.auditor.answered[uid] = GROUP
                        self.auditor.ended_at[uid] = time.monotonic()
                        self.auditor.completed.add(uid)
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


class SoakProcesses:
    """What the row starts besides the cluster, and how each part is killed."""

    def __init__(self, cluster: SurvivalCluster, chance: random.Random) -> None:
        self.kills: dict[str, int] = {}
        self.record = cluster.folder / "trained.jsonl"
        self.door_port = free_port()
        self._cluster = cluster
        self._chance = chance
        self._stack = ExitStack()
        self._door: GatewayProcess | None = None
        self._trainer: subprocess.Popen[bytes] | None = None
        self.victims: dict[str, Callable[[], Awaitable[None]]] = {
            "gateway": self._kill_gateway,
            "link": self._kill_link,
            "shard": self._kill_shard,
            "reward": self._kill_reward_worker,
            "trainer": self._kill_trainer,
            "door": self._kill_door,
        }

    async def start(self) -> None:
        function = self._cluster.folder / "soak_reward.py"
        function.write_text(REWARD)
        flags = {"function": f"{function}:score", "workers": 2, "cpus": 0, "children": 1}
        await asyncio.to_thread(self._cluster.nodes.run, "rewards", **flags)
        await asyncio.to_thread(self._start_door)
        self._start_trainer()

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.wait()
        self._stack.close()

    async def kill_one(self) -> None:
        what = self._chance.choice(sorted(self.victims))
        await self.victims[what]()
        self.kills[what] = self.kills.get(what, 0) + 1

    def _start_door(self) -> None:
        folder = self._cluster.folder
        flags = {"ray_address": self._cluster.nodes.address, "state": folder / "door.json"}
        self._door = self._stack.enter_context(atropos_process(folder / "door.log", port=self.door_port, **flags))

    def _start_trainer(self) -> None:
        with (self._cluster.folder / "trainer.log").open("ab") as log:
            line = [sys.executable, "-m", "benchmarks.survival.soak_trainer", self._cluster.nodes.address]
            self._trainer = subprocess.Popen([*line, str(self.record)], stdout=log, stderr=log)

    async def _kill_gateway(self) -> None:
        index = self._chance.randrange(GATEWAYS - 1)
        self._cluster.gateways[index].kill()
        await asyncio.to_thread(self._cluster.fleet.start_again, index)

    async def _kill_link(self) -> None:
        gateway = self._chance.choice(self._cluster.gateways[:-1])
        for pid in await asyncio.to_thread(_links_of, gateway.process.pid):
            _kill(pid)

    async def _kill_shard(self) -> None:
        shard = self._chance.choice((await self._cluster.pool.shards.names())[1:])
        try:
            pid = await asyncio.to_thread(self._cluster.shard_pid, shard)
        except LookupError:
            return  # it is on its way back
        _kill(pid)

    async def _kill_reward_worker(self) -> None:
        workers = await asyncio.to_thread(_workers_of_ray, b"RewardLoopWorker")
        if workers:
            _kill(self._chance.choice(workers))

    async def _kill_trainer(self) -> None:
        assert self._trainer is not None
        self._trainer.kill()
        await asyncio.to_thread(self._trainer.wait)
        self._start_trainer()

    async def _kill_door(self) -> None:
        assert self._door is not None
        self._door.kill()
        await asyncio.to_thread(self._start_door)


@dataclass(frozen=True, slots=True)
class Soak:
    minutes: float = MINUTES

    name = "soak"

    @property
    def fault(self) -> str:
        return f"everything killed at random for {self.minutes:g} min at 50 steps/s"

    async def run(self, *, quick: bool) -> RowOutcome:
        seconds = 20.0 if quick else self.minutes * 60
        auditor, chance = SoakAuditor(), random.Random(0)
        async with (
            survival_cluster(
                gateways=GATEWAYS, shards=SHARDS, gateway_flags={"durability": "sync"}, require_reward=True
            ) as cluster,
            _processes(cluster, chance) as processes,
        ):
            if not quick:
                await _fill_memories(cluster.pool)
            witness = Witness([cluster.gateways[-1].process.pid, cluster.shard_pid("data_pool")])
            load = AgentLoad(cluster.urls, auditor, pause=PAUSE, reward=None)
            environment = Environment(auditor, processes.door_port)
            async with asyncio.TaskGroup() as working:
                watching = working.create_task(witness.watch())
                working.create_task(load.run(AGENTS))
                working.create_task(environment.run(load.stopped))
                began = told = time.monotonic()
                while time.monotonic() - began < seconds:
                    await asyncio.sleep(chance.uniform(*KILL_PAUSE))
                    async with asyncio.timeout(KILL_TIMEOUT):
                        await processes.kill_one()
                    if time.monotonic() - told > PROGRESS_INTERVAL:
                        told = time.monotonic()
                        print(_progress(told - began, auditor, processes, witness), flush=True)
                rate = auditor.answered.total() / (time.monotonic() - began)
                load.stopped.set()
                watching.cancel()
            processes.close()
            await _until_no_leases(cluster)
            await auditor.settle(cluster.pool, read_record(processes.record))
        print(f"killed: {processes.kills}")
        counted = {"steps_per_s": round(rate, 1), "kills": sum(processes.kills.values())}
        figures = auditor.figures() | counted | witness.figures() | {"groups_twice": auditor.groups_twice}
        most = {**NOTHING_LOST, "groups_twice": 0, "descriptors_grown": 10}
        if self.minutes >= SLOPE_MINUTES and not quick:
            most["memory_percent_per_h"] = 2.0
        return RowOutcome(figures, most, {"steps_per_s": 50})


@asynccontextmanager
async def _processes(cluster: SurvivalCluster, chance: random.Random) -> AsyncIterator[SoakProcesses]:
    processes = SoakProcesses(cluster, chance)
    try:
        await processes.start()
        yield processes
    finally:
        processes.close()


async def _fill_memories(pool: PoolClient) -> None:
    """A shard remembers many trajectories that are gone. While that fills up, a leak could not be seen."""
    limits, began = (await pool.shards.plan()).limits, time.monotonic()
    wanted = int(1.1 * SHARDS * limits.closed_kept)
    for _ in range(0, wanted, FILL_MESSAGE):
        await pool.submit_steps([_last_step() for _ in range(FILL_MESSAGE)], channel=FILL)
        await pool.clear(FILL)
    print(f"{wanted} trajectories are remembered after {time.monotonic() - began:.0f} s", flush=True)


def _last_step() -> Step:
    """With names as long as those that gateways give."""
    ids, uid, prompt_uid = ids_array([1, 2]), uuid4().hex, uuid4().hex
    return Step(prompt_ids=ids, response_ids=ids, trajectory_uid=uid, prompt_uid=prompt_uid, reward=0.0, is_last=True)


def _progress(seconds: float, auditor: Auditor, processes: SoakProcesses, witness: Witness) -> str:
    steps, kills = auditor.answered.total(), sum(processes.kills.values())
    memory = witness.samples[-1][1] / 1e6
    return f"{seconds / 60:.0f} min: {steps} steps ({steps / seconds:.1f}/s), {kills} kills, witnesses {memory:.0f} MB"


async def _until_no_leases(cluster: SurvivalCluster) -> None:
    """What the last trainer had returns some seconds after its death."""
    async with asyncio.timeout(LEASE_TIMEOUT):
        while True:
            if not (await cluster.pool.stats()).leases:
                return
            await asyncio.sleep(0.5)


def _rollout_of(step: TrainedStep) -> str:
    """As the auditor names it."""
    return f"{DOOR}{step.first_id}" if step.trajectory_uid.startswith("scored-") else step.trajectory_uid


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, signal.SIGKILL)


def _links_of(gateway: int) -> list[int]:
    """The processes that have joined Ray for a gateway."""
    return [
        pid
        for pid in _processes_with(b"stepwell.pool.client.link_process")
        if f"PPid:\t{gateway}\n" in _read(pid, "status").decode()
    ]


def _workers_of_ray(title: bytes) -> list[int]:
    """The processes of actors of that class, on the cluster of this process."""
    token = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode()
    return [pid for pid in _processes_with(b"ray::" + title) if token in _read(pid, "environ")]


def _processes_with(words: bytes) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        if words in _read(int(process.name), "cmdline"):
            yield int(process.name)


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""
