"""Gateway, shard, trainer and the canary's engine are killed in turn, while users talk and a guard tests new versions.

Gateways refuse what they cannot record (`--durability sync --unchecked-calls refuse`): a call waits for a shard that
restarts. By default they would answer it, and count it as unrecorded.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import aiohttp

from benchmarks.survival.cluster import SurvivalCluster, survival_cluster, until_ready
from benchmarks.survival.guard_history import GuardHistory, contradictions
from benchmarks.survival.live_trainer import GUARD, VERSIONS, LiveCheckpoint, read_live_checkpoint
from benchmarks.survival.live_users import LiveUsers
from benchmarks.survival.row import RowOutcome
from rig.gateways import free_port
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.rules.batch_selection import ROLLED_BACK

ROUNDS, USERS = 3, 10
GATEWAYS, SHARDS, ENGINES = 2, 2, 2
SESSION_IDLE = 3.0
TOKEN_DELAY = 0.02
"""Seconds between two tokens of an engine, so that calls are in flight when something is killed."""
STEP_TIMEOUT = 120.0
"""Seconds for a canary to begin, and for what was killed to be back."""
ABSENCE = 0.5, GUARD.engine_timeout + 2.0
"""Seconds for which the canary's engine is away: in the first round it is back in time, in the second the canary ends,
and so on in turn."""
PROMOTIONS = 2
"""After the last kill."""
PATIENCE = 60.0
"""Seconds without progress after which what is not trained counts as lost."""
REWARD = "def score(sample):\n    return 1.0\n"


class LiveProcesses:
    """What the row starts besides the cluster, and how each part is killed. Each is back when its kill returns."""

    def __init__(self, cluster: SurvivalCluster, ports: list[int]) -> None:
        self.kills: Counter[str] = Counter()
        self.engines = [f"http://127.0.0.1:{port}" for port in ports]
        self.guard = GuardHistory(cluster.folder / VERSIONS)
        self._cluster = cluster
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.victims: dict[str, Callable[[], Awaitable[None]]] = {
            "gateway": self._kill_gateway,
            "shard": self._kill_shard,
            "trainer": self._kill_trainer,
            "engine": self._kill_engine,
        }

    async def start(self) -> None:
        """The first version is on all engines when it returns."""
        function = self._cluster.folder / "live_reward.py"
        function.write_text(REWARD)
        flags = {"function": f"{function}:score", "workers": 1, "cpus": 0, "children": 1}
        await asyncio.to_thread(self._cluster.nodes.run, "rewards", **flags)
        for url in self.engines:
            await self._start_engine(url)
        await self._cluster.pool.change_engines(add=tuple(self.engines))
        await self._start_trainer()

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    async def kill(self, what: str) -> None:
        """While a canary is tested."""
        await until(self.guard.is_testing, "a canary")
        await self.victims[what]()
        self.kills[what] += 1

    async def _kill_gateway(self) -> None:
        index = self.kills["gateway"] % GATEWAYS
        self._cluster.gateways[index].kill()
        await asyncio.to_thread(self._cluster.fleet.start_again, index)

    async def _kill_shard(self) -> None:
        """The first one, which has the canary and the decisions, in the first round."""
        shard = (await self._cluster.pool.shards.names())[self.kills["shard"] % SHARDS]
        killed = await asyncio.to_thread(self._cluster.shard_pid, shard)
        os.kill(killed, signal.SIGKILL)
        await until(partial(self._is_back, shard, killed), "the shard")
        await until_ready(self._cluster.pool)

    async def _is_back(self, shard: str, killed: int) -> bool:
        try:
            return await asyncio.to_thread(self._cluster.shard_pid, shard) != killed
        except LookupError:
            return False

    async def _kill_trainer(self) -> None:
        self._kill("trainer")
        await self._start_trainer()

    async def _kill_engine(self) -> None:
        canary = await self._cluster.pool.canary()
        url = self.engines[-1] if canary is None else canary.engines[0]
        absence = ABSENCE[self.kills["engine"] % len(ABSENCE)]
        self._kill(url)
        await asyncio.sleep(absence)
        await self._start_engine(url)
        await until(partial(_has_version, url), "the engine's weights")

    def _kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    async def _start_trainer(self) -> None:
        line = ("benchmarks.survival.live_trainer", self._cluster.nodes.address, str(self._cluster.folder))
        await self._start("trainer", *line)

    async def _start_engine(self, url: str) -> None:
        await self._start(url, "rig.fake_engine", "--port", url.rpartition(":")[2])
        async with (
            aiohttp.ClientSession() as http,
            http.put(f"{url}/fake/faults", json={"token_delay_s": TOKEN_DELAY}) as answer,
        ):
            assert answer.status == 200, await answer.text()

    async def _start(self, name: str, *line: str) -> None:
        """Returns when it has said its first line."""
        log = self._cluster.folder / f"{name.rpartition('/')[2].replace(':', '-')}.log"
        process = self._running[name] = _process(line, log)
        assert process.stdout is not None
        told = await asyncio.to_thread(process.stdout.readline)
        assert told, f"{name} ended:\n{log.read_text()}"


def _process(line: Sequence[str], log: Path) -> "subprocess.Popen[str]":
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", *line], stdout=subprocess.PIPE, stderr=output, text=True)


class LiveKills:
    name = "live_kills"
    fault = "gateway, shard, trainer and canary's engine killed in turn while users talk and a guard tests versions"

    async def run(self, *, quick: bool) -> RowOutcome:
        ports = [free_port() for _ in range(ENGINES)]
        addresses = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        async with survival_cluster(
            gateways=GATEWAYS,
            shards=SHARDS,
            gateway_flags={"durability": "sync", "unchecked_calls": "refuse", "vllm_addresses": addresses},
            require_reward=True,
            session_idle=SESSION_IDLE,
        ) as cluster:
            processes, users = LiveProcesses(cluster, ports), LiveUsers(cluster.urls)
            try:
                await processes.start()
                async with asyncio.TaskGroup() as working:
                    following = working.create_task(processes.guard.follow())
                    working.create_task(users.run(USERS))
                    for _ in range(1 if quick else ROUNDS):
                        for what in processes.victims:
                            await processes.kill(what)
                            print(f"killed: {what}", flush=True)
                    killed_at = time.time()
                    await _learns(cluster, killed_at)
                    users.stopped.set()
                    following.cancel()
                checkpoint = await _all_trained(cluster, users)
                decisions = await cluster.pool.decisions()
                stats = await cluster.pool.stats()
            finally:
                processes.close()
        print(f"killed: {dict(processes.kills)}; requests without an answer: {dict(users.causes)}")
        dropped = {cause: count.steps for cause, count in stats.channels["train"].dropped.items()}
        return _outcome(users, checkpoint, processes, decisions, killed_at, dropped)


def _outcome(
    users: LiveUsers,
    checkpoint: LiveCheckpoint,
    processes: LiveProcesses,
    decisions: list[PolicyDecision],
    killed_at: float,
    dropped: dict[str, int],
) -> RowOutcome:
    steps = Counter(uid for uid, _ in checkpoint.trained)
    of_call = Counter(dict(checkpoint.trained).values())
    promoted = [decision.at for decision in decisions if decision.action == "promote"]
    found = contradictions(decisions)
    for text in (*found, *processes.guard.went_back):
        print(text)
    withdrawn = dropped.get(ROLLED_BACK, 0)
    figures = {
        "kills": processes.kills.total(),
        "sessions": users.sessions,
        "sessions_lost": users.lost,
        "calls": len(users.answered),
        "calls_sent_again": sum(sent > 1 for sent in users.answered.values()),
        "calls_unanswered": users.unanswered,
        "steps_trained": len(steps),
        "steps_rolled_back": withdrawn,
        "steps_lost": max(0, len(users.answered.keys() - of_call.keys()) - withdrawn),
        "steps_twice": sum(count - 1 for count in steps.values())
        + sum(max(0, of_call[name] - sent) for name, sent in users.answered.items()),
        "promotions": len(promoted),
        "rollbacks": sum(decision.action == "rollback" for decision in decisions),
        "promotions_after": sum(at > killed_at for at in promoted),
        "guard_contradictions": len(found),
        "guard_went_back": len(processes.guard.went_back),
    }
    none = ("sessions_lost", "calls_unanswered", "steps_lost", "steps_twice", "guard_contradictions", "guard_went_back")
    return RowOutcome(figures, dict.fromkeys(none, 0), {"promotions_after": PROMOTIONS})


async def until(is_true: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + STEP_TIMEOUT
    while not await is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {STEP_TIMEOUT:g} s for {what}")
        await asyncio.sleep(0.05)


async def _has_version(url: str) -> bool:
    """Has the engine the weights of a version?"""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/weight_info") as answer:
        return str((await answer.json())["weight_version"]).isdecimal()


async def _learns(cluster: SurvivalCluster, since: float) -> None:
    """Until enough versions were promoted since then, or for STEP_TIMEOUT."""
    deadline = time.monotonic() + STEP_TIMEOUT
    while time.monotonic() < deadline:
        decisions = await cluster.pool.decisions()
        if sum(decision.action == "promote" and decision.at > since for decision in decisions) >= PROMOTIONS:
            return
        await asyncio.sleep(0.5)


async def _all_trained(cluster: SurvivalCluster, users: LiveUsers) -> LiveCheckpoint:
    """Until every answered call is trained, or nothing more is."""
    checkpoint, changed_at = LiveCheckpoint(), time.monotonic()
    while time.monotonic() - changed_at < PATIENCE:
        await asyncio.sleep(0.5)
        found = await asyncio.to_thread(read_live_checkpoint, cluster.folder)
        if len(found.trained) > len(checkpoint.trained):
            checkpoint, changed_at = found, time.monotonic()
        stats = await cluster.pool.stats()
        is_empty = not stats.missing and not stats.channels["train"].held.steps
        if users.answered.keys() <= {name for _, name in checkpoint.trained} or is_empty:
            break
    return checkpoint
