"""A DataPool under load whose shards are killed repeatedly: is a step lost, is one trained twice?

Producers send groups of trajectories, a few steps per message. Consumers take them under leases and acknowledge them,
return them, come too late or never come back. Meanwhile one shard after the other is killed with SIGKILL. All answers
of the pool are recorded, and compared with what it shipped in the end.

    python -m benchmarks.chaos_pool --kills 100
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

import numpy as np
from stepwell.pool.actors import start_pool

from benchmarks.report import report
from rig.waiting import until
from stepwell.errors import FetchTimeout
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.api.transport import ActorAway
from stepwell.pool.client import PoolClient
from stepwell.pool.client.batch import Batch
from stepwell.pool.shard.ray_transport import RayTransport
from stepwell.steps.step import IntArray, Step, logprobs_array, mask_array

POOL, SHARDS = "chaos", 4
PRODUCERS, CONSUMERS = 12, 8
AHEAD = 3_000
"""Steps the producers may be ahead of the consumers."""
VOCABULARY = 150_000
BETWEEN_KILLS = 51
"""Steps that are acknowledged from one kill to the next at least, so that a slow machine is not killed while idle."""
PROGRESS_TIMEOUT = 60.0
SHORT_LEASE = 0.5
DRAIN = 90.0
"""Seconds the pool has to give out what it holds, once all is quiet."""


@dataclass(slots=True)
class Record:
    """What the pool told producers and consumers, and the sums of it."""

    groups: dict[str, list[Step]] = field(default_factory=dict)
    """By prompt_uid, as they were sent."""
    acknowledged: set[str] = field(default_factory=set)
    """Steps the pool told their producer it has."""
    done_at: dict[str, float] = field(default_factory=dict)
    """Steps the pool told a consumer are its own for good."""
    perhaps: set[str] = field(default_factory=set)
    """Steps whose acknowledgement met a pool that knew no such lease: settled before, unless they come out again."""
    duplicated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    """Groups that did not come out whole and bit for bit."""
    came_back: set[str] = field(default_factory=set)
    """Steps that came out again though their acknowledgement had raised nothing: the lease was unknown, not done."""
    settlements: Counter[str] = field(default_factory=Counter)

    def sent(self, steps: Sequence[Step], verdicts: Sequence[SubmitVerdict]) -> None:
        for step, verdict in zip(steps, verdicts, strict=True):
            if verdict in (SubmitVerdict.ACCEPTED, SubmitVerdict.DUPLICATE):
                self.acknowledged.add(step.uid)

    def fetched(self, batch: Batch, since: float) -> None:
        """A batch that was asked for at `since`: nothing in it may have been done before that."""
        for group in batch.groups():
            steps = [step for trajectory in group for step in trajectory]
            if not same_steps(self.groups[steps[0].prompt_uid], steps):
                self.damaged.add(steps[0].prompt_uid)
            for step in steps:
                if self.done_at.get(step.uid, since) < since:
                    self.duplicated.add(step.uid)
                if step.uid in self.perhaps:
                    self.perhaps.discard(step.uid)
                    self.came_back.add(step.uid)

    def settled(self, uids: Sequence[str], settlement: Settlement) -> None:
        self.settlements[settlement.value] += 1
        if settlement is Settlement.DONE:
            self.duplicated.update(uid for uid in uids if uid in self.done_at)
            self.done_at.update(dict.fromkeys(uids, time.monotonic()))
        elif settlement is Settlement.UNKNOWN:
            self.perhaps.update(uid for uid in uids if uid not in self.done_at)

    @property
    def acked(self) -> int:
        return len(self.done_at.keys() | self.perhaps)

    @property
    def lost(self) -> set[str]:
        return self.acknowledged - self.done_at.keys() - self.perhaps


@dataclass(frozen=True, slots=True)
class Outcome:
    record: Record
    recoveries: list[float]
    """Seconds from each SIGKILL until that shard answered again."""

    def figures(self) -> dict[str, float]:
        return {
            "lost": len(self.record.lost),
            "duplicated": len(self.record.duplicated),
            "damaged_groups": len(self.record.damaged),
            "came_back_after_silent_ack": len(self.record.came_back),
            "kills": len(self.recoveries),
            "recovery_median_s": round(statistics.median(self.recoveries), 2),
            "recovery_worst_s": round(max(self.recoveries), 2),
            "steps_acknowledged": len(self.record.acknowledged),
            "steps_acked": self.record.acked,
        }


async def run_chaos(
    namespace: str,
    journal: Path,
    *,
    kills: int,
    seed: int = 0,
    lease: float = 30.0,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Start a pool in that namespace, torment it, and drain it."""
    plan = PoolPlan(name=POOL, shards=SHARDS, limits=Limits(max_queue_size=10**6), journal=str(journal))
    await asyncio.to_thread(start_pool, plan, namespace)
    client, record, stop = PoolClient(POOL, namespace), Record(), asyncio.Event()
    silent = PoolClient(POOL, namespace, heartbeat_interval=24 * 3600.0)
    async with asyncio.TaskGroup() as load:
        for n in range(PRODUCERS):
            load.create_task(Producer(client, record, random.Random(f"{seed}-p{n}"), f"{n}").run(stop))
        for n in range(CONSUMERS):
            load.create_task(Consumer(client, silent, record, random.Random(f"{seed}-c{n}"), lease).run(stop))
        recoveries = await Killer(client, namespace, record, random.Random(f"{seed}-k"), say).run(kills)
        stop.set()
    say("draining")
    await drain(client, record, lease)
    return Outcome(record, recoveries)


async def drain(client: PoolClient, record: Record, lease: float) -> None:
    """Take and acknowledge until the pool holds nothing, under lease neither."""
    deadline = time.monotonic() + DRAIN
    while (channel := (await client.stats()).channels["train"]).held.steps:
        if time.monotonic() > deadline:
            return
        if channel.ready_groups == 0:
            await asyncio.sleep(0.2)  # some are still under a lease that no one will end
            continue
        since = time.monotonic()
        try:
            batch = await client.fetch_batch(min(channel.ready_groups, 64), timeout=1.0, lease=lease)
        except FetchTimeout:
            continue
        record.fetched(batch, since)
        await acknowledge(client, record, batch)


async def acknowledge(client: PoolClient, record: Record, batch: Batch) -> None:
    """As `PoolClient.ack` does it, but telling what each shard answered."""

    async def ask(shard: str, lease: str) -> tuple[str, Settlement]:
        return shard, await client.shards.at(shard).ack(lease)

    uids: dict[str, list[str]] = {}
    for prompt_uid, uid in zip(batch.columns.prompt_uids, batch.columns.uids, strict=True):
        uids.setdefault(await client.shards.owner(prompt_uid), []).append(uid)
    worst: dict[str, Settlement] = {}
    order = [Settlement.DONE, Settlement.UNKNOWN, Settlement.EXPIRED]
    for shard, settlement in await asyncio.gather(*(ask(*lease) for lease in batch.leases)):
        worst[shard] = max(worst.get(shard, Settlement.DONE), settlement, key=order.index)
    for shard, settlement in worst.items():
        record.settled(uids[shard], settlement)


class Producer:
    """Sends one group after the other. A call that found no pool is made again, as a gateway would."""

    def __init__(self, client: PoolClient, record: Record, luck: random.Random, name: str) -> None:
        self._client, self._record, self._luck, self._name = client, record, luck, name
        self._numbers = np.random.default_rng(luck.getrandbits(32))

    async def run(self, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            if len(self._record.acknowledged) - self._record.acked > AHEAD:
                await asyncio.sleep(0.05)
                continue
            number += 1
            await self._group(f"{self._name}-{number}")

    async def _group(self, prompt_uid: str) -> None:
        size = self._luck.randint(2, 4)
        rollouts = [self._rollout(prompt_uid, f"{prompt_uid}-{n}") for n in range(size)]
        self._record.groups[prompt_uid] = [step for steps in rollouts for step in steps]
        for steps in rollouts:
            uid, left = steps[0].trajectory_uid, steps
            await self._client.register_trajectory(Registration(uid, prompt_uid, "train", size))
            while left:
                count = self._luck.randint(1, 3)
                message, left = left[:count], left[count:]
                self._record.sent(message, await self._client.submit_steps(message))
            await self._client.complete_trajectory(uid, prompt_uid, float(len(steps)))

    def _rollout(self, prompt_uid: str, uid: str) -> list[Step]:
        """Turns that mostly continue one another; now and then the agent has compacted its context."""
        steps: list[Step] = []
        context = self._ids(60)
        for n in range(self._luck.randint(2, 6)):
            response = self._ids(20)
            step = Step(
                prompt_ids=context,
                response_ids=response,
                response_logprobs=logprobs_array(-self._numbers.random(len(response))),
                response_mask=mask_array(self._numbers.random(len(response)) < 0.8),
                trajectory_uid=uid,
                prompt_uid=prompt_uid,
                uid=f"{uid}-{n}",
                started_at=float(n),
            )
            steps.append(step)
            kept = context[: len(context) // 2] if self._luck.random() < 0.2 else np.concatenate([context, response])
            context = np.concatenate([kept, self._ids(10)])
        return steps

    def _ids(self, most: int) -> IntArray:
        return self._numbers.integers(0, VOCABULARY, self._luck.randint(1, most), dtype=np.int32)


class Consumer:
    """Takes batches. Mostly it acknowledges them; some it gives back, settles too late, or forgets."""

    def __init__(
        self, client: PoolClient, silent: PoolClient, record: Record, luck: random.Random, lease: float
    ) -> None:
        """`silent` is a client that sends no heartbeats, as one that is dead."""
        self._client, self._silent, self._record, self._luck, self._lease = client, silent, record, luck, lease

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            end = self._luck.choices(["ack", "nack", "late", "forget"], [80, 8, 6, 6])[0]
            is_dead = end in ("late", "forget")
            client, lease = (self._silent, SHORT_LEASE) if is_dead else (self._client, self._lease)
            since = time.monotonic()
            try:
                batch = await client.fetch_batch(self._luck.randint(1, 8), timeout=1.0, lease=lease)
            except FetchTimeout:
                continue
            self._record.fetched(batch, since)
            if end == "nack":
                await self._client.nack(batch)
            elif end == "late":
                await asyncio.sleep(2 * SHORT_LEASE)
            if end in ("ack", "late"):
                await acknowledge(self._client, self._record, batch)


class Killer:
    """Kills shards that are up, one after the other, and clocks each one's way back."""

    def __init__(
        self, client: PoolClient, namespace: str, record: Record, luck: random.Random, say: Callable[[str], None]
    ) -> None:
        self._client, self._record, self._luck, self._say = client, record, luck, say
        self._transport = RayTransport(namespace)
        self._up: dict[str, int] = {}
        self._one_is_up = asyncio.Event()
        self._recoveries: list[float] = []

    async def run(self, kills: int) -> list[float]:
        for name in await self._client.shards.names():
            self._up[name] = await self._pid(name)
        self._one_is_up.set()
        async with asyncio.TaskGroup() as recoveries:
            for number in range(kills):
                await asyncio.sleep(self._luck.uniform(1.0, 2.0))
                wanted = BETWEEN_KILLS * (number + 1)
                await until(partial(self._has_taken, wanted), f"{wanted} steps in the pool", PROGRESS_TIMEOUT)
                await self._one_is_up.wait()
                name = self._luck.choice(sorted(self._up))
                recoveries.create_task(self._kill(name, self._up.pop(name), f"kill {number + 1}/{kills}"))
                if not self._up:
                    self._one_is_up.clear()
        return self._recoveries

    def _has_taken(self, steps: int) -> bool:
        return len(self._record.acknowledged) >= steps

    async def _kill(self, name: str, pid: int, title: str) -> None:
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while (new := await self._pid(name)) == pid:
            pass  # answered in its last moment
        self._recoveries.append(time.monotonic() - start)
        self._up[name] = new
        self._one_is_up.set()
        self._say(
            f"{title}: {name} back after {self._recoveries[-1]:.1f} s; {len(self._record.acknowledged):,} steps in, "
            f"{self._record.acked:,} out, acks {dict(self._record.settlements)}"
        )

    async def _pid(self, name: str) -> int:
        def pid(_: object) -> int:
            return os.getpid()

        while True:
            try:
                return int(await self._transport.call(name, "__ray_call__", [pid], {}))
            except ActorAway:
                await asyncio.sleep(0.2)


def same_steps(sent: Sequence[Step], got: Sequence[Step]) -> bool:
    """The same steps in the same order, their tokens, log-probabilities and masks bit for bit."""

    def plain(step: Step) -> tuple[object, ...]:
        mask = np.ones(len(step.response_ids), np.bool_) if step.response_mask is None else step.response_mask
        logprobs = None if step.response_logprobs is None else step.response_logprobs.tobytes()
        return step.uid, step.prompt_ids.tobytes(), step.response_ids.tobytes(), logprobs, mask.tobytes()

    return [plain(step) for step in sent] == [plain(step) for step in got]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos_pool")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    with (
        start_ray() as cluster,
        tempfile.TemporaryDirectory() as journal,
        cluster.namespace() as namespace,
    ):
        outcome = asyncio.run(run_chaos(namespace, Path(journal), kills=args.kills, seed=args.seed, say=say))
    report(outcome.figures(), at_most={"lost": 0, "duplicated": 0, "damaged_groups": 0})


if __name__ == "__main__":
    main()
