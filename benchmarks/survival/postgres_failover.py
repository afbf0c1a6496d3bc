"""The PostgreSQL that has the journals is killed, and its synchronous replica takes over."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.lost_node import BEFORE, MOST_CALLS, SHARDS, epochs, until_answering, until_opened
from benchmarks.survival.row import RowOutcome
from rig.postgres import PostgresServer, postgres_folder, postgres_server, url_of
from rig.waiting import wait_until

AGENTS = 8
NOTICED = 3.0
"""Seconds after which whoever watches the primary promotes the replica."""


class PostgresFailover:
    name = "postgres_failover"
    fault = "PostgreSQL primary killed under load, synchronous replica promoted"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        with primary_and_replica() as (primary, replica):
            async with survival_cluster(shards=SHARDS, journal=url_of(primary, replica)) as cluster:
                load = AgentLoad(cluster.urls, auditor, most_calls=MOST_CALLS)
                working = asyncio.create_task(load.run(2 if quick else AGENTS))
                await asyncio.sleep(BEFORE if quick else 4 * BEFORE)
                before = epochs(primary)
                await asyncio.to_thread(primary.kill)
                await asyncio.sleep(NOTICED)
                began = time.monotonic()
                await asyncio.to_thread(replica.promote)
                await until_opened(replica, before)
                await until_answering(cluster)
                served = time.monotonic() - began
                load.stopped.set()
                await working
                await auditor.drain(cluster.pool)
        figures = auditor.figures() | {"served_s": round(served, 1)}
        return RowOutcome(figures, {"served_s": 30.0, **NOTHING_LOST}, {"answered_percent": 100.0})


@contextmanager
def primary_and_replica() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A commit waits until the replica has it."""
    with postgres_server("synchronous_standby_names=*") as primary, postgres_folder() as folder:
        replica = PostgresServer(folder / "data", ())
        replica.copy(primary)
        try:
            replica.start()
            replicating = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            wait_until(lambda: primary.ask(replicating) == "1", "the replica to follow")
            yield primary, replica
        finally:
            replica.kill()
