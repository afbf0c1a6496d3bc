"""A shard that takes steps until it is killed, several at a time. Prints the number of each acknowledged step."""

import asyncio
import sys
from pathlib import Path

from stepwell.pool.slices.producing import AddSteps

from rig.asked import asked
from rig.builders import make_step
from stepwell.pool.api.plan import JournalSync, PoolPlan
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.columns import pack

IN_FLIGHT = 4


async def produce(service: ShardService, first: int) -> None:
    number = first
    while True:
        step = make_step(f"t{number}", f"p{number}", uid=f"s{number}")
        if await asked(service, AddSteps(pack([step]), "train")) == [SubmitVerdict.ACCEPTED]:
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
        number += IN_FLIGHT


async def main(path: str, sync: str) -> None:
    journal = SqliteJournal(Path(path), closed_kept=100, sync=JournalSync(sync))
    service = ShardService(PoolPlan(min_free_bytes=0), "data_pool", journal=journal)
    await asyncio.gather(*(produce(service, first) for first in range(IN_FLIGHT)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
