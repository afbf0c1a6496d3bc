"""D3, D12: a lost database ends a shard and costs nothing that was acknowledged; a shard that was replaced ends too."""

from uuid import uuid4

import pytest
from stepwell.pool.slices.producing import AddSteps, Register

from rig.asked import asked
from rig.builders import make_step
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.service import ShardService
from stepwell.steps.columns import pack

pytest.importorskip("psycopg")

import psycopg

from stepwell.pool.shard.postgres_journal import PostgresStore


class DatabaseShard:
    def __init__(self, url: str, name: str) -> None:
        self.store = PostgresStore(url, name)
        self.has_ended = False
        self.service = ShardService(
            PoolPlan(name=name, journal=url),
            name,
            journal=ShardJournal(self.store, closed_kept=100),
            on_journal_failure=self._end,
        )

    async def submit(self, n: int) -> SubmitVerdict:
        await self.service.run([Register(Registration(f"t{n}", f"p{n}"))])
        (verdict,) = await asked(self.service, AddSteps(pack([make_step(f"t{n}", f"p{n}", uid=f"s{n}")])))
        return verdict

    def _end(self) -> None:
        self.has_ended = True
        self.store.close()


async def test_a_shard_whose_database_is_lost_ends_and_its_successor_has_all_that_was_acknowledged(
    postgres_url: str,
) -> None:
    name = uuid4().hex
    shard = DatabaseShard(postgres_url, name)
    assert [await shard.submit(n) for n in range(3)] == [SubmitVerdict.ACCEPTED] * 3
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (shard.store.db.info.backend_pid,))
    with pytest.raises(PoolUnavailable, match="cannot be written"):
        await shard.submit(3)
    assert shard.has_ended
    shard = DatabaseShard(postgres_url, name)
    assert [await shard.submit(n) for n in range(3)] == [SubmitVerdict.DUPLICATE] * 3
    assert await shard.submit(3) is SubmitVerdict.ACCEPTED
    shard.store.close()


async def test_a_shard_that_was_only_cut_off_acknowledges_nothing_after_it_was_replaced(postgres_url: str) -> None:
    name = uuid4().hex
    old = DatabaseShard(postgres_url, name)
    assert await old.submit(0) is SubmitVerdict.ACCEPTED
    new = DatabaseShard(postgres_url, name)
    with pytest.raises(PoolUnavailable, match="was opened by another process"):
        await old.submit(1)
    assert old.has_ended
    assert await new.submit(0) is SubmitVerdict.DUPLICATE
    assert await new.submit(1) is SubmitVerdict.ACCEPTED
    new.store.close()
