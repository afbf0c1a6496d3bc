"""A shard on a small disk that fills up and is freed. Runs in a mount namespace and prints what it saw as JSON."""

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.actor import start_pool
from tests.builders import make_step

TOKENS = 50_000
ROOM = 2**20
"""Bytes that are left when the disk begins to be short."""
FULL_SECONDS = 3.0
"""How long the disk stays full after the first refusal."""


async def send(client: PoolClient, n: int) -> SubmitVerdict:
    step = make_step(f"t{n}", f"p{n}", uid=f"s{n}", prompt_ids=range(n, n + TOKENS))
    (verdict,) = await client.submit_steps([step], channel="train")
    return verdict


def fill(filler: Path) -> None:
    """Until nothing is left but the room."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - ROOM)


async def run(disk: Path) -> dict[str, object]:
    plan = PoolPlan(journal=str(disk / "journal"), min_free_bytes=0)
    start_pool(plan, "default")
    client = PoolClient(plan.name, timeout=1.0)
    acknowledged = []
    for n in range(5):
        await client.register_trajectory(Registration(f"t{n}", f"p{n}"))
        assert await send(client, n) is SubmitVerdict.ACCEPTED
        acknowledged.append(n)
    fill(disk / "filler")
    refusals: list[str] = []
    ends = time.monotonic() + 60
    n = len(acknowledged)
    while not refusals and time.monotonic() < ends:
        try:
            await send(client, n)
            acknowledged.append(n)
            n += 1
        except PoolUnavailable as refusal:
            refusals.append(str(refusal))
    ends = time.monotonic() + FULL_SECONDS
    while time.monotonic() < ends:
        try:
            await send(client, n)
            acknowledged.append(n)
            n += 1
        except PoolUnavailable as refusal:
            refusals.append(str(refusal))
            await asyncio.sleep(0.2)
    (disk / "filler").unlink()
    freed = time.monotonic()
    while time.monotonic() < freed + 60:
        with suppress(PoolUnavailable):
            await send(client, n)
            break
        await asyncio.sleep(0.1)
    healed = time.monotonic() - freed
    again = [await send(PoolClient(plan.name), n) for n in acknowledged]
    return {
        "acknowledged": len(acknowledged),
        "still there": again.count(SubmitVerdict.DUPLICATE),
        "refusals": refusals,
        "healed after": healed,
    }


def main() -> None:
    with start_ray(object_store_memory=80 * 2**20):
        result = asyncio.run(run(Path(sys.argv[1])))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
