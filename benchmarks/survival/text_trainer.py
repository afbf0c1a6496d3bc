"""A trainer that notes the text of every step it was given to train: `text_trainer RAY_ADDRESS FILE`.

Each line of the file is a trajectory and the text of one of its steps, written after the batch was acknowledged.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rig.texts import texts_of
from stepwell.errors import FetchTimeout, PoolUnavailable
from stepwell.pool.client import connect

if TYPE_CHECKING:
    from benchmarks.survival.cluster import SurvivalCluster  # in the trainer's process it would set Ray's token anew

LEASE = 60.0
FETCH_TIMEOUT = 2.0
PATIENCE = 60.0
"""Seconds without a step after which what is not trained counts as lost."""


@contextmanager
def text_trainer(cluster: "SurvivalCluster") -> Iterator[Path]:
    """The process, and its file."""
    file = cluster.folder / "trained.jsonl"
    line = [sys.executable, "-m", "benchmarks.survival.text_trainer", cluster.nodes.address, str(file)]
    log = cluster.folder / "trainer.log"
    with log.open("ab") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output)
    try:
        yield file
        if process.poll() is not None:
            raise RuntimeError(f"the trainer ended:\n{log.read_text()}")
    finally:
        process.kill()
        process.wait()


async def all_trained(cluster: "SurvivalCluster", file: Path) -> dict[str, list[str]]:
    """The trained texts by trajectory, as soon as the pool holds no steps, or none are trained for a while."""
    size, changed_at = 0, time.monotonic()
    while time.monotonic() - changed_at < PATIENCE:
        await asyncio.sleep(0.5)
        found = await asyncio.to_thread(_read, file)
        if len(found) > size:
            size, changed_at = len(found), time.monotonic()
        stats = await cluster.pool.stats()
        if not stats.missing and not any(channel.held.steps for channel in stats.channels.values()):
            break
    trained = defaultdict(list)
    for uid, text in await asyncio.to_thread(_read, file):
        trained[uid].append(text)
    return trained


def _read(file: Path) -> list[tuple[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    address, name = sys.argv[1:]
    pool = connect("data_pool", address=address)
    with Path(name).open("a") as file:
        while True:
            try:
                batch = pool.fetch_batch(1, timeout=FETCH_TIMEOUT, lease=LEASE, min_exactness="retokenized")
            except (FetchTimeout, PoolUnavailable):
                continue
            texts = texts_of(batch.steps())
            pool.ack(batch)
            file.writelines(json.dumps(text) + "\n" for text in texts)
            file.flush()


if __name__ == "__main__":
    main()
