"""How long a shard stands still while it forgets a subject (docs/privacy.md).

A shard with a SQLite journal of 300 MB takes 50 steps a second. In each round its loop is watched while it forgets a
person, and for as long without more to do: the longest time for which no call was answered.

    python -m benchmarks.forgetting
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import numpy as np
from stepwell.pool.slices.producing import AddSteps, Register

from benchmarks.report import report
from rig.asked import asked
from rig.builders import make_step
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.forgetting import Forget
from stepwell.steps.columns import pack

MB = 10**6
MEGABYTES, ROUNDS, SECONDS = 300, 5, 20.0
QUICK_MEGABYTES, QUICK_ROUNDS, QUICK_SECONDS = 20, 1, 2.0
RATE, TOKENS, PEOPLE = 50, 8_000, 1_000
MORE_MS = 100.0
TICK = 0.005


class People:
    """Steps of one person after the other."""

    def __init__(self, shard: ShardService) -> None:
        self._shard = shard
        self._numbers = np.random.default_rng(0)
        self._count = count()

    async def say(self, steps: int = 1) -> None:
        said = []
        for n in (next(self._count) for _ in range(steps)):
            await self._shard.run([Register(Registration(f"t{n}", f"p{n}", metadata={"subject": f"u{n % PEOPLE}"}))])
            prompt = self._numbers.integers(0, 150_000, TOKENS, dtype=np.int32)
            said.append(make_step(f"t{n}", f"p{n}", uid=f"s{n}", prompt_ids=prompt))
        await asked(self._shard, AddSteps(pack(said)))

    async def talk(self) -> None:
        """For as long as it is not cancelled."""
        while True:
            began = time.monotonic()
            await self.say()
            await asyncio.sleep(max(0.0, 1 / RATE - (time.monotonic() - began)))


class LoopWatch:
    def __init__(self) -> None:
        self.longest = self.busy = 0.0
        """Seconds without an answer; and those of them in which the loop computed, which others on the machine do not
        make longer."""

    async def run(self) -> None:
        while True:
            began, computed = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK)
            self.longest = max(self.longest, time.monotonic() - began - TICK)
            self.busy = max(self.busy, time.thread_time() - computed)


@asynccontextmanager
async def watched() -> AsyncIterator[LoopWatch]:
    watch = LoopWatch()
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()


async def measure(folder: Path, *, megabytes: int, rounds: int, seconds: float) -> dict[str, float]:
    path = folder / "data_pool.sqlite"
    journal = SqliteJournal(path, closed_kept=1_000)
    plan = PoolPlan(uid="5f0c", limits=Limits(max_bytes=None), min_free_bytes=0)
    shard = ShardService(plan, "data_pool", journal=journal)
    people = People(shard)
    while path.stat().st_size < megabytes * MB:
        await people.say(20)
    talking = asyncio.create_task(people.talk())
    alone, forgetting, busy, took = [], [], [], []
    for number in range(rounds):
        began = time.monotonic()
        async with watched() as watch:
            receipt = await shard.run_long(Forget(f"u{number}"))
        assert receipt.is_done
        assert receipt.removed["trajectories"]
        forgetting.append(watch.longest)
        busy.append(watch.busy)
        took.append(time.monotonic() - began)
        async with watched() as watch:
            await asyncio.sleep(max(seconds, took[-1]))  # as long: the longest of more pauses is longer
        alone.append(watch.longest)
    talking.cancel()
    journal.store.close()
    return {
        "journal_mb": round(path.stat().st_size / MB),
        "alone_longest_ms": round(1000 * max(alone), 1),
        "forgetting_longest_ms": round(1000 * max(forgetting), 1),
        "forgetting_busy_ms": round(1000 * max(busy), 1),
        "more_ms": round(1000 * (max(forgetting) - max(alone)), 1),
        "forget_s": round(max(took), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a journal of 20 MB, one round")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is to be measured")
    options = parser.parse_args()
    size, rounds, seconds = (
        (QUICK_MEGABYTES, QUICK_ROUNDS, QUICK_SECONDS) if options.quick else (MEGABYTES, ROUNDS, SECONDS)
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = asyncio.run(measure(Path(folder), megabytes=size, rounds=rounds, seconds=seconds))
    report(figures, {"more_ms": MORE_MS})


if __name__ == "__main__":
    main()
