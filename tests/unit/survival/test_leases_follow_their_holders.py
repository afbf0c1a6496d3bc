"""D8: heartbeats keep a lease, silence ends it; a batch of several shards is taken and acknowledged as a whole."""

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stepwell.pool.slices.producing import AddSteps, Complete, Register

from rig.asked import asked
from rig.builders import make_step
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.errors import FetchTimeout, LeaseExpired, PoolUnavailable
from stepwell.pool.api.leasing import DECISION, BatchRequest, Settlement, new_batch_uid, part_lease_uid
from stepwell.pool.api.plan import Layout, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.transport import ActorAway
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.state.state_base import ENDED_KEPT
from stepwell.steps.columns import pack

SHARDS = 4
PROMPTS = [
    next(f"p{n}" for n in range(index, 1000) if Layout(1, SHARDS).owner(f"p{n}") == index) for index in range(SHARDS)
]
"""One for each shard."""
LEASE = 600.0
TIMEOUT = 0.3
"""Seconds after which a silent holder is dead, in these tests."""


class LeasedElsewhere(NamedTuple):
    leases: tuple[tuple[str, str], ...]


class DyingTransport(LocalTransport):
    """A shard dies when it is called by that name, before it does anything."""

    def __init__(self, services: dict[str, ShardService]) -> None:
        super().__init__(services)
        self.dies_at: tuple[str, str] | None = None
        """Shard and method."""
        self.calls: list[str] = []

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls.append(method)
        if self.dies_at == (shard, method):
            self.dies_at = None
            self.shards_away.add(shard)
            raise ActorAway("killed")
        return await super().call(shard, method, args, kwargs)


def made_pool(**settings: Any) -> LocalPool:
    times: dict[str, Any] = {
        "heartbeat_timeout": TIMEOUT,
        "heartbeat_interval": TIMEOUT / 10,
        "timeout": 0.2,
        "part_timeout": 0.1,
    }
    return LocalPool(shards=SHARDS, transport=DyingTransport, clock=time.monotonic, **times, **settings)


async def fill(
    pool: LocalPool, prompts: Sequence[str] = PROMPTS, rollouts: int = 1, reward: float | None = 1.0
) -> None:
    for prompt in prompts:
        for uid in [f"t-{prompt}-{n}" for n in range(rollouts)]:
            await pool.register_trajectory(Registration(uid, prompt))
            assert await pool.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
            assert await pool.complete_trajectory(uid, prompt, reward) is EndResult.COMPLETED


def leases(pool: LocalPool) -> int:
    return sum(len(service.pool.state.leases) for service in pool.transport.services.values())


def shipped(pool: LocalPool) -> int:
    channels = [service.pool.state.channels.get("train") for service in pool.transport.services.values()]
    return sum(channel.ledger.shipped.steps for channel in channels if channel is not None)


async def test_a_living_holder_keeps_its_lease_beyond_its_seconds() -> None:
    pool = made_pool()
    await fill(pool)
    batch = await pool.fetch_batch(SHARDS, lease=2 * TIMEOUT)
    await until(lambda: pool.transport.calls.count("renew") > 40 * SHARDS, "heartbeats for four times that long")
    assert leases(pool) == SHARDS
    await pool.ack(batch)
    assert (leases(pool), shipped(pool)) == (0, SHARDS)


async def test_what_a_silent_holder_had_returns_long_before_its_lease_ends() -> None:
    pool = made_pool()
    await fill(pool)
    dead = PoolClient(pool.plan.name, transport=pool.transport, heartbeat_interval=3600.0)
    batch = await dead.fetch_batch(SHARDS, lease=LEASE)
    assert leases(pool) == SHARDS
    await until(lambda: leases(pool) == 0, "the leases to return")
    again = await pool.fetch_batch(SHARDS, lease=LEASE)
    assert again.attempts_G.tolist() == [1] * SHARDS
    with pytest.raises(LeaseExpired):
        await dead.ack(batch)
    await pool.ack(again)
    assert shipped(pool) == SHARDS


async def test_a_shard_that_was_stopped_ends_no_lease_before_it_has_listened() -> None:
    pool = made_pool()
    await fill(pool)
    batch = await pool.fetch_batch(SHARDS, lease=LEASE)
    time.sleep(3 * TIMEOUT)  # shards and client stand still  # noqa: ASYNC251
    sent = pool.transport.calls.count("renew")
    await until(lambda: pool.transport.calls.count("renew") >= sent + 20 * SHARDS, "heartbeats")
    await pool.ack(batch)
    assert shipped(pool) == SHARDS


async def test_a_lease_without_heartbeats_lasts_for_its_seconds() -> None:
    pool = made_pool()
    await fill(pool)
    began = time.monotonic()
    filled = await pool.fill_batch(SHARDS, channel="train", shares={}, lease=4 * TIMEOUT, heartbeats=False)
    assert filled is not None
    while (await pool.stats()).leases:
        await asyncio.sleep(0.01)
    assert time.monotonic() - began > 3 * TIMEOUT
    assert "renew" not in pool.transport.calls


async def test_a_shard_that_dies_between_look_and_take_costs_the_other_parts_nothing() -> None:
    pool = made_pool()
    await fill(pool)
    pool.transport.dies_at = ("data_pool-2", "take")
    with pytest.raises(FetchTimeout, match="data_pool-2: it does not answer"):
        await pool.fetch_batch(SHARDS, lease=LEASE, timeout=0.5)
    await until(lambda: leases(pool) == 0, "the parts to be put back")
    pool.transport.shards_away.clear()
    assert (await pool.fetch_batch(SHARDS)).attempts_G.tolist() == [0] * SHARDS


async def test_a_part_that_could_not_be_taken_is_taken_elsewhere() -> None:
    pool = made_pool()
    await fill(pool, rollouts=2)
    pool.transport.dies_at = ("data_pool-2", "take")
    batch = await pool.fetch_batch(6, lease=LEASE, timeout=20.0)
    assert PROMPTS[2] not in batch.columns.prompt_uids
    assert len(batch) == 6


async def test_an_acknowledgement_is_for_all_parts_or_for_none() -> None:
    pool = made_pool()
    await fill(pool)
    batch = await pool.fetch_batch(SHARDS, lease=LEASE)
    (shard, uid), *_ = batch.leases
    pool.transport.services[shard].pool.leasing.end_silent([uid])
    with pytest.raises(LeaseExpired, match="silent for too long"):
        await pool.ack(batch)
    assert (leases(pool), shipped(pool)) == (0, 0)
    assert len(await pool.fetch_batch(SHARDS)) == SHARDS


async def test_an_acknowledgement_waits_for_a_shard_that_is_away_and_can_be_repeated() -> None:
    pool = made_pool()
    await fill(pool)
    batch = await pool.fetch_batch(SHARDS, lease=LEASE)
    pool.transport.shards_away.add("data_pool-1")
    with pytest.raises(PoolUnavailable, match="'data_pool-1'"):
        await pool.ack(batch)
    assert shipped(pool) == 0
    pool.transport.shards_away.clear()
    await pool.ack(batch)
    await pool.ack(batch)
    assert (leases(pool), shipped(pool)) == (0, SHARDS)


async def test_a_shard_that_dies_within_an_acknowledgement_gets_it_when_it_is_back() -> None:
    pool = made_pool()
    await fill(pool)
    batch = await pool.fetch_batch(SHARDS, lease=LEASE)
    pool.transport.dies_at = ("data_pool-1", "ack")
    await pool.ack(batch)
    assert shipped(pool) == SHARDS - 1
    pool.transport.shards_away.clear()
    await until(lambda: shipped(pool) == SHARDS, "the last part")


@pytest.mark.parametrize("lease", [("another_actor", "live-a-0"), ("data_pool", "live-a@another_actor-0")])
async def test_a_lease_at_what_is_no_shard_of_the_pool_is_none(lease: tuple[str, str]) -> None:
    pool = made_pool()
    foreign = LeasedElsewhere((lease,))
    for settle in (pool.ack, pool.nack):
        with pytest.raises(LeaseExpired, match="'another_actor' is no shard of this pool"):
            await settle(foreign)
    assert not {"ack", "ack_several", "nack"} & set(pool.transport.calls)


async def test_what_a_silent_reward_worker_had_is_offered_long_before_its_lease_ends() -> None:
    pool = made_pool(require_reward=True)
    await fill(pool, PROMPTS[:1], reward=None)
    dead = PoolClient(pool.plan.name, transport=KilledTransport(pool.transport.services, 0))
    taken = await dead.take_unscored(1, lease=LEASE, timeout=1.0)
    assert taken is not None
    again = await pool.take_unscored(1, lease=LEASE, timeout=30.0)
    assert again is not None
    assert [[step.uid for step in steps] for steps in again[1]] == [[step.uid for step in steps] for steps in taken[1]]


async def test_a_living_reward_worker_keeps_what_it_has() -> None:
    pool = made_pool(require_reward=True)
    await fill(pool, PROMPTS[:1], reward=None)
    assert await pool.take_unscored(1, lease=LEASE, timeout=1.0) is not None
    assert await pool.take_unscored(1, lease=LEASE, timeout=5 * TIMEOUT) is None


class KilledTransport(LocalTransport):
    """That of a trainer that is killed within its acknowledgement: so many calls of it arrive."""

    def __init__(self, services: dict[str, ShardService], calls: int) -> None:
        super().__init__(services)
        self.left = calls
        self.is_killed = asyncio.Event()

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method in ("renew", "ack", "ack_several", "nack"):
            self.left -= 1
            if self.left < 0:
                self.is_killed.set()
                await asyncio.Event().wait()
        return await super().call(shard, method, args, kwargs)


@pytest.mark.parametrize("calls", range(2 * SHARDS + 1))
async def test_a_trainer_killed_anywhere_in_an_acknowledgement_leaves_all_parts_acknowledged_or_none(
    calls: int,
) -> None:
    pool = made_pool()
    await fill(pool)
    transport = KilledTransport(pool.transport.services, calls)
    trainer = PoolClient(pool.plan.name, transport=transport, heartbeat_interval=3600.0)
    batch = await trainer.fetch_batch(SHARDS, lease=LEASE)
    acknowledging = asyncio.create_task(trainer.ack(batch))
    await transport.is_killed.wait()
    acknowledging.cancel()
    await until(lambda: leases(pool) == 0, "the leases to end")
    is_decided = calls > SHARDS
    assert shipped(pool) == (SHARDS if is_decided else 0)
    again = PoolClient(pool.plan.name, transport=pool.transport)
    if is_decided:
        await again.ack(batch)
    else:
        with pytest.raises(LeaseExpired):
            await again.ack(batch)
    assert shipped(pool) == (SHARDS if is_decided else 0)


async def test_a_part_waits_for_a_coordinator_that_is_away() -> None:
    pool = made_pool()
    await fill(pool)
    transport = KilledTransport(pool.transport.services, SHARDS + 1)
    trainer = PoolClient(pool.plan.name, transport=transport, heartbeat_interval=3600.0)
    batch = await trainer.fetch_batch(SHARDS, lease=LEASE)
    acknowledging = asyncio.create_task(trainer.ack(batch))
    await transport.is_killed.wait()
    acknowledging.cancel()
    pool.transport.shards_away.add(batch.leases[0][0])
    await until(lambda: leases(pool) == SHARDS - 1, "the coordinator's own part")
    asked = pool.transport.calls.count("nack")
    await until(lambda: pool.transport.calls.count("nack") > asked + SHARDS, "the others to ask in vain")
    assert leases(pool) == SHARDS - 1
    pool.transport.shards_away.clear()
    await until(lambda: shipped(pool) == SHARDS, "the decision")


async def test_a_decision_is_kept_until_all_shards_have_ended_their_parts_and_no_longer() -> None:
    pool = made_pool()
    await fill(pool, rollouts=2)
    batch = await pool.fetch_batch(SHARDS, lease=LEASE)
    coordinator = pool.transport.services[batch.leases[0][0]].pool.state
    pool.transport.dies_at = ("data_pool-1" if coordinator.shard != 1 else "data_pool-2", "ack")
    await pool.ack(batch)
    assert len(coordinator.acknowledged) == 1
    pool.transport.shards_away.clear()
    await until(lambda: not coordinator.acknowledged, "the coordinator to be told")
    assert shipped(pool) == SHARDS
    await pool.ack(batch)
    await pool.ack(await pool.fetch_batch(SHARDS, lease=LEASE))
    assert not any(service.pool.state.acknowledged for service in pool.transport.services.values())


COORDINATOR, OTHER = "data_pool", "data_pool-1"


class PreparedBatch:
    """A batch with a part of each of two shards, of which the holder is about to acknowledge all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        batch_uid = new_batch_uid(heartbeats=True, coordinator=COORDINATOR)
        self.parts = part_lease_uid(batch_uid, 0), part_lease_uid(batch_uid, 1)
        self.decision = f"{batch_uid}{DECISION}"
        self.coordinator = self.opened_coordinator()
        self.is_cut_off = True
        self.other = ShardService(PoolPlan(shards=2), OTHER, ask_decision=self.ask, heartbeat_timeout=TIMEOUT)

    def opened_coordinator(self) -> ShardService:
        self.journal = SqliteJournal(self.path, closed_kept=100)
        return ShardService(PoolPlan(shards=2, min_free_bytes=0), COORDINATOR, journal=self.journal)

    async def ask(self, _: str, decision: str) -> Settlement:
        if self.is_cut_off:
            raise PoolUnavailable("no answer")
        return await self.coordinator.nack(decision)

    async def prepare(self) -> None:
        request = BatchRequest(count=1, channel="train")
        for shard, part in zip((self.coordinator, self.other), self.parts, strict=True):
            await shard.run([Register(Registration(part, part))])
            await asked(shard, AddSteps(pack([make_step(part, part, uid=part)])))
            await shard.run([Complete(part, part, 1.0)])
            assert await shard.take(request, LEASE, part) is not None
            await shard.renew([part, self.decision])

    async def reach_coordinator(self) -> None:
        """The other shard, of which the holder is silent."""
        self.is_cut_off = False
        await until(lambda: not self.other.pool.state.leases, "the decision")

    async def end_many_leases(self) -> None:
        for number in range(0, ENDED_KEPT + 1, 1000):
            await self.coordinator.ack_several([f"{n}{DECISION}" for n in range(number, number + 1000)])

    def restart(self) -> None:
        self.journal.store.close()
        self.coordinator = self.opened_coordinator()


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_shard_that_is_back_after_any_number_of_leases_learns_that_its_part_is_trained(
    tmp_path: Path, *, restarts: bool
) -> None:
    batch = PreparedBatch(tmp_path / "journal.sqlite")
    await batch.prepare()
    assert await batch.coordinator.ack(batch.decision) is Settlement.DONE
    await batch.coordinator.ack(batch.parts[0])
    await batch.end_many_leases()
    if restarts:
        batch.restart()
    await batch.reach_coordinator()
    assert await batch.other.ack(batch.parts[1]) is Settlement.DONE
    assert await batch.other.take(BatchRequest(count=1, channel="train"), LEASE, "again") is None
    batch.journal.store.close()


async def test_a_batch_of_which_a_part_has_returned_is_not_acknowledged_after_any_number_of_leases(
    tmp_path: Path,
) -> None:
    batch = PreparedBatch(tmp_path / "journal.sqlite")
    await batch.prepare()
    await batch.reach_coordinator()
    assert await batch.other.take(BatchRequest(count=1, channel="train"), LEASE, "again") is not None
    await batch.end_many_leases()
    assert await batch.coordinator.ack(batch.decision) is Settlement.EXPIRED
    assert await batch.coordinator.ack(batch.parts[0]) is not Settlement.DONE
    batch.journal.store.close()


async def test_a_shard_that_keeps_too_many_decisions_refuses_a_batch_and_returns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.pool.rules.leasing.MAX_ACKNOWLEDGED", 0)
    batch = PreparedBatch(tmp_path / "journal.sqlite")
    await batch.prepare()
    assert await batch.coordinator.ack(batch.decision) is Settlement.EXPIRED
    request = BatchRequest(count=1, channel="train")
    assert await batch.coordinator.take(request, LEASE, "again") is not None
    batch.journal.store.close()


def test_a_fetch_that_was_interrupted_takes_nothing() -> None:
    local = made_pool()
    pool = DataPool(local)

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError):
            pool.fetch_batch(1, lease=LEASE, timeout=60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    pool._run(fill(local))
    assert len(pool.fetch_batch(SHARDS, timeout=10.0)) == SHARDS
