"""A shard that trains groups, and archives them, until it is killed.

Prints the name of each trajectory whose training it has acknowledged, and whose late reward.
"""

import asyncio
import sys
import time
from itertools import count
from pathlib import Path

from stepwell.pool.slices.producing import AddSteps, Complete, GiveReward, Register

from rig.asked import asked, trained
from rig.builders import make_step
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, RewardGiven
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.columns import pack

GROUPS_PER_FILE = 5
LOG_PAGES = 20
"""Every sync copies the log, so it is short."""
SPEED = 3000
"""The clock of the archive runs so many times as fast: late rewards and lineage are written every tenth of a second."""


def open_archive(folder: Path, journal: SqliteJournal) -> ParquetArchive:
    url, per_file = str(folder / "deep" / "archive"), GROUPS_PER_FILE
    return ParquetArchive(url, "data_pool", journal, groups_per_file=per_file, clock=lambda: SPEED * time.monotonic())


async def main(folder: Path) -> None:
    journal = SqliteJournal(folder / "data_pool.sqlite", closed_kept=100)
    journal.db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
    archive = open_archive(folder, journal)
    service = ShardService(PoolPlan(min_free_bytes=0), "data_pool", journal=journal, archive=archive)
    for number in count():
        uid, prompt = f"t{number}", f"p{number}"
        await service.run([Register(Registration(uid, prompt))])
        await asked(service, AddSteps(pack([make_step(uid, prompt, uid=f"s{number}")])))
        await service.run([Complete(uid, prompt, 1.0)])
        await trained(service)
        sys.stdout.write(f"group {uid}\n")
        sys.stdout.flush()
        assert await asked(service, GiveReward(RewardGiven(trajectory_uid=uid, prompt_uid=prompt, value=0.5)))
        sys.stdout.write(f"reward {uid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
