"""Issue 16, 4: the number of shards changes under load. Nothing is lost, nothing comes twice, groups stay whole."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from stepwell.pool.slices.producing import AddGroups, AddSteps, ChannelIfOpen, Register

from rig.asked import asked, trained
from rig.builders import make_group, make_step
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.errors import Conflict, FetchTimeout, PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.plan import Layout, LayoutDiffers, Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.resharding import LEAVE_DELAY, DrainWatch, reshard
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.curation import Curation, CurationAction
from stepwell.steps.columns import pack

PROMPTS = [f"p{n}" for n in range(40)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class UnevenTransport(LocalTransport):
    """Messages and answers take different times, so that calls are routed by plans of before."""

    chance = random.Random()

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        await self._wait()
        answer = await super().call(shard, method, args, kwargs)
        await self._wait()
        return answer

    async def _wait(self) -> None:
        for _ in range(self.chance.randint(0, 8)):
            await asyncio.sleep(0)


class HoldingTransport(LocalTransport):
    """Producers' calls wait until they are let go."""

    def __init__(self, services: dict[str, ShardService]) -> None:
        super().__init__(services)
        self.go = asyncio.Event()
        self.go.set()
        self.asked: set[str] = set()
        """The shards whose calls wait."""

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method == "run" and not self.go.is_set():
            self.asked.add(shard)
            await self.go.wait()
        return await super().call(shard, method, args, kwargs)


async def change(pool: LocalPool, shards: int) -> PoolPlan:
    async def start(plan: PoolPlan, changed: PoolPlan) -> None:
        pool.add_shards(plan, changed)

    plan = await pool.transport.call("data_pool", "plan", (), {})
    return await reshard(pool.transport, plan, shards, start)


def another_client(pool: LocalPool) -> PoolClient:
    """A process that learns of the change by itself."""
    return PoolClient("data_pool", transport=pool.transport)


def drain_watch(pool: LocalPool, clock: Clock) -> DrainWatch:
    async def end(shards: Sequence[str]) -> None:
        for shard in shards:
            del pool.transport.services[shard]

    return DrainWatch(pool.transport, "data_pool", end, grace=60.0, clock=clock)


async def roll_out(client: PoolClient, uid: str, prompt: str, group_size: int = 1) -> None:
    await client.register_trajectory(Registration(uid, prompt, group_size=group_size))
    assert await client.submit_steps([make_step(uid, prompt, uid=f"{uid}-0")]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


async def fetch_all(client: PoolClient) -> list[list[str]]:
    """The trajectories of each group that is ready."""
    found: list[list[str]] = []
    while True:
        try:
            batch = await client.fetch_batch(1, timeout=0.05, lease=60.0)
        except FetchTimeout:
            return found
        await client.ack(batch)
        found += [[trajectory[0].trajectory_uid for trajectory in group] for group in batch.groups()]


def groups_by_shard(pool: LocalPool) -> dict[str, int]:
    services = pool.transport.services
    return {name: sum(map(len, service.pool.state.channels.values())) for name, service in services.items()}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 5), (4, 8), (8, 3), (3, 1)])
async def test_a_group_that_was_begun_before_a_change_is_completed_whole(before: int, after: int) -> None:
    pool = LocalPool(shards=before)
    stale = another_client(pool)
    for prompt in PROMPTS:
        await roll_out(stale, f"{prompt}-a", prompt, group_size=2)
    await change(pool, after)
    for prompt in PROMPTS:
        await roll_out(stale, f"{prompt}-b", prompt, group_size=2)
    assert sorted(map(sorted, await fetch_all(pool))) == sorted([f"{p}-a", f"{p}-b"] for p in PROMPTS)


async def test_new_groups_go_to_the_new_shards_and_none_to_those_that_leave() -> None:
    pool = LocalPool(shards=2)
    await change(pool, 4)
    for prompt in PROMPTS:
        await roll_out(pool, prompt, prompt)
    assert groups_by_shard(pool) == Counter(
        f"data_pool-{n}" if (n := Layout(2, 4).owner(p)) else "data_pool" for p in PROMPTS
    )
    await change(pool, 1)
    held = groups_by_shard(pool)
    for prompt in PROMPTS:
        await roll_out(pool, f"{prompt}-later", f"{prompt}-later")
    assert groups_by_shard(pool) == held | {"data_pool": held["data_pool"] + len(PROMPTS)}


async def test_a_further_shard_takes_its_share_from_all_others_and_moves_nothing_between_them() -> None:
    moved = {(Layout(2, 4).owner(p), Layout(3, 5).owner(p)) for p in map(str, range(5000))}
    assert moved == {(n, n) for n in range(4)} | {(n, 4) for n in range(4)}
    counts = Counter(Layout(2, 8).owner(f"prompt-{n}") for n in range(8000))
    assert max(counts.values()) < 1.3 * min(counts.values())


async def uids_of_turns(pool: LocalPool, trajectory_uid: str, prompt_uid: str) -> list[str]:
    return [turn.uid for turn in await pool.turns(trajectory_uid, prompt_uid, "digest")]


@pytest.mark.parametrize(
    ("ask", "of_the_step", "of_none"),
    [
        (LocalPool.channel_if_open, "train", None),
        (uids_of_turns, ["s"], []),
        (lambda pool, uid, prompt: pool.step_extras(uid, prompt, "kept", "s"), {"s": {"n": 1}}, {}),
    ],
    ids=["channel_if_open", "turns", "step_extras"],
)
async def test_all_shards_that_may_have_a_trajectory_are_asked_at_once_by_calls_that_open_no_group(
    ask: Callable[[LocalPool, str, str], Awaitable[Any]], of_the_step: Any, of_none: Any
) -> None:
    pool = LocalPool(shards=4, transport=HoldingTransport)
    for prompt in PROMPTS:
        await pool.register_trajectory(Registration(prompt, prompt))
    await change(pool, 8)
    plan = await change(pool, 3)
    await pool.shards.agree_with("data_pool")
    prompt = max(PROMPTS, key=lambda prompt: len(plan.owners(prompt)))
    assert len(plan.owners(prompt)) == 3
    step = make_step(prompt, prompt, uid="s", lineage={"replied": "digest"}, extras={"kept": {"n": 1}})
    assert await pool.submit_steps([step]) == [SubmitVerdict.ACCEPTED]
    pool.transport.go.clear()
    asking = asyncio.ensure_future(ask(pool, prompt, prompt))
    await until(lambda: pool.transport.asked == set(plan.owners(prompt)), "three shards to be asked", 5.0)
    pool.transport.go.set()
    assert await asking == of_the_step
    assert await ask(pool, prompt, "another prompt") == of_none


async def test_trajectories_of_before_are_found_by_clients_that_do_not_know_of_the_change() -> None:
    pool = LocalPool(shards=4)
    stale = another_client(pool)
    for prompt in PROMPTS:
        await stale.register_trajectory(Registration(prompt, prompt))
    await change(pool, 8)
    await change(pool, 3)
    for prompt in PROMPTS:
        assert await stale.channel_if_open(prompt, prompt) == "train"
        assert await stale.give_reward(RewardGiven(trajectory_uid=prompt, prompt_uid=prompt, value=2.0))
    steps = [make_step(prompt, prompt, uid=prompt) for prompt in PROMPTS]
    assert set(await stale.submit_steps(steps)) == {SubmitVerdict.ACCEPTED}
    assert set(await stale.submit_steps(steps)) == {SubmitVerdict.DUPLICATE}
    assert len((await stale.read([(prompt, prompt) for prompt in PROMPTS])).prompt_uids) == len(PROMPTS)
    assert await stale.submit_steps([make_step("nobody", "p0")]) == [SubmitVerdict.UNKNOWN]


async def test_a_group_that_is_sent_again_after_a_change_is_a_duplicate() -> None:
    pool = LocalPool(shards=3)
    groups = [make_group(prompt, 2) for prompt in PROMPTS]
    steps = [step for sent, _ in groups for step in sent]
    registrations = [one for _, registered in groups for one in registered]
    assert set(await pool.submit_groups(steps, registrations)) == {SubmitVerdict.ACCEPTED}
    await change(pool, 5)
    assert set(await pool.submit_groups(steps, registrations)) == {SubmitVerdict.DUPLICATE}
    assert len(await fetch_all(pool)) == len(PROMPTS)
    assert set(await pool.submit_groups(steps, registrations)) <= {SubmitVerdict.DUPLICATE, SubmitVerdict.LATE}


async def test_a_shard_that_missed_the_change_learns_it_from_a_client_before_it_opens_a_group() -> None:
    pool = LocalPool(shards=2)
    stale, fresh = another_client(pool), another_client(pool)
    await stale.shards.plan()
    pool.transport.shards_away = {"data_pool-1"}
    await change(pool, 6)
    pool.transport.shards_away = set()
    moved = next(p for p in PROMPTS if Layout(1, 2).owner(p) == 1 and Layout(2, 6).owner(p) > 1)
    await fresh.register_trajectory(Registration("a", moved, group_size=2))
    await stale.register_trajectory(Registration("b", moved, group_size=2))
    assert groups_by_shard(pool)["data_pool-1"] == 0
    assert sum(groups_by_shard(pool).values()) == 1


async def test_a_process_of_a_release_without_revisions_keeps_its_steps() -> None:
    pool = LocalPool(shards=2)
    await pool.register_trajectory(Registration("t", "p0"))
    await change(pool, 3)
    service = pool.transport.services[await pool.shards.owner("p0")]
    for call in (service.run([ChannelIfOpen("t", "p0")]), asked(service, AddSteps(pack([make_step("t", "p0")])))):
        with pytest.raises(PoolUnavailable, match="bring it to the release of the pool"):
            await call


async def test_a_shard_leaves_when_it_is_empty_and_the_clients_have_noticed() -> None:
    pool, clock = LocalPool(shards=4), Clock()
    watch = drain_watch(pool, clock)
    for prompt in PROMPTS:
        await roll_out(pool, prompt, prompt)
    await change(pool, 2)
    clock.now += 1000.0
    await watch.look()
    batch = await pool.fetch_batch(len(PROMPTS), lease=60.0)
    await watch.look()
    clock.now += 1000.0
    await watch.look()
    assert len(pool.transport.services) == 4, "a lease may return its groups"
    await pool.ack(batch)
    await watch.look()
    clock.now += 59.0
    await watch.look()
    assert (await pool.transport.services["data_pool"].plan()).draining, "an acknowledgement may be repeated"
    clock.now += 1.0
    await watch.look()
    assert not (await pool.transport.services["data_pool"].plan()).draining
    clock.now += LEAVE_DELAY
    await watch.look()
    assert set(pool.transport.services) == {"data_pool", "data_pool-1"}
    client = another_client(pool)
    await roll_out(client, "later", "later")
    assert await fetch_all(client) == [["later"]]
    await change(pool, 4)
    for n in range(20):
        await roll_out(pool, f"again-{n}", f"again-{n}")
    assert len(await fetch_all(pool)) == 20


async def test_a_pool_of_a_similar_name_is_no_shard_that_has_left() -> None:
    pool, clock = LocalPool(shards=1), Clock()
    await change(pool, 2)
    pool.transport.services["data_pool-2"] = ShardService(PoolPlan(name="data_pool-2"), "data_pool-2")
    watch = drain_watch(pool, clock)
    for _ in range(4):
        await watch.look()
        clock.now += 100.0
    assert set(pool.transport.services) == {"data_pool", "data_pool-1", "data_pool-2"}


async def test_a_late_reward_finds_a_trajectory_that_was_trained_before_the_change() -> None:
    pool, clock = LocalPool(shards=2), Clock()
    for prompt in PROMPTS:
        await roll_out(pool, prompt, prompt)
    assert len(await fetch_all(pool)) == len(PROMPTS)
    await change(pool, 5)
    for _ in range(2):
        await drain_watch(pool, clock).look()
        clock.now += 60.0
    for client in (pool, another_client(pool)):
        for prompt in PROMPTS:
            reward = RewardGiven(trajectory_uid=prompt, prompt_uid=prompt, value=2.0)
            assert not await client.give_reward(reward), "it is known, and there is no archive"
        with pytest.raises(UnknownTrajectory):
            await client.give_reward(RewardGiven(trajectory_uid="nobody", prompt_uid="p", value=2.0))


async def test_a_shard_that_leaves_first_archives_all_that_it_has(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "data_pool-1.sqlite", closed_kept=100)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool-1", journal)
    plan = PoolPlan(shards=2, limits=Limits(history_size=5), min_free_bytes=0, revision=1)
    shard = ShardService(plan, "data_pool-1", journal=journal, archive=archive)
    prompt = next(p for p in PROMPTS if Layout(1, 2).owner(p) == 1)
    await asked(shard, AddGroups(pack(make_group(prompt, 1)[0]), make_group(prompt, 1)[1]), 1)
    await trained(shard)
    await shard.adopt_plan(plan.resharded(1))
    assert await shard.undrained() == 1
    archive.flush()
    assert await shard.undrained() == 0
    assert len(list((tmp_path / "archive").glob("*.parquet"))) == 1
    journal.close()


async def test_shards_that_were_started_for_a_change_that_was_interrupted_are_used_by_the_next() -> None:
    pool, clock = LocalPool(shards=2), Clock()
    plan = await pool.shards.plan()
    pool.add_shards(plan, plan.resharded(4))
    watch = drain_watch(pool, clock)
    clock.now += 1000.0
    await watch.look()
    assert len(pool.transport.services) == 4
    await change(pool, 4)
    for prompt in PROMPTS:
        await roll_out(pool, prompt, prompt)
    assert len(await fetch_all(pool)) == len(PROMPTS)


async def test_of_two_commands_at_the_same_time_one_is_refused() -> None:
    pool = LocalPool(shards=2)

    async def change_first(plan: PoolPlan, changed: PoolPlan) -> None:
        pool.add_shards(plan, changed)
        await change(pool, 5)

    with pytest.raises(Conflict, match="changed by another command"):
        await reshard(pool.transport, await pool.shards.plan(), 3, change_first)
    assert (await another_client(pool).shards.plan()).shards == 5


async def test_a_new_shard_has_the_policy_version() -> None:
    pool = LocalPool(shards=1)
    trainer = another_client(pool)
    await trainer.set_policy_version(7)
    await change(pool, 3)
    assert {service.pool.policy_version for service in pool.transport.services.values()} == {7}
    await trainer.register_trajectory(Registration("t", next(p for p in PROMPTS if Layout(2, 3).owner(p))))
    await trainer.set_policy_version(8)
    assert {service.pool.policy_version for service in pool.transport.services.values()} == {8}


async def test_a_shard_that_restarts_during_a_change_goes_on_with_it(tmp_path: Path) -> None:
    plan = PoolPlan(shards=2, min_free_bytes=0, revision=1)
    moved = next(p for p in PROMPTS if Layout(1, 2).owner(p) == 1 and Layout(2, 6).owner(p) != 1)

    def opened() -> tuple[SqliteJournal, ShardService]:
        journal = SqliteJournal(tmp_path / "data_pool-1.sqlite", closed_kept=100)
        return journal, ShardService(plan, "data_pool-1", journal=journal)

    journal, shard = opened()
    await shard.run([Register(Registration("t", moved, group_size=2))], 1)
    await shard.adopt_plan(plan.resharded(6))
    journal.close()
    journal, shard = opened()
    assert (await shard.plan()).layouts == (Layout(1, 2), Layout(2, 6))
    assert await shard.undrained() == 1
    assert await shard.run([Register(Registration("u", moved, group_size=2))], 2) == [None]
    (refused,) = await shard.run([Register(Registration("v", moved, group_size=2))], 2)
    assert isinstance(refused, PoolUnavailable)
    journal.close()


@pytest.mark.parametrize("seed", range(4))
async def test_under_random_changes_every_rollout_is_trained_once_in_a_whole_group(seed: int) -> None:
    chance = random.Random(seed)
    pool = LocalPool(shards=chance.randint(1, 4), transport=UnevenTransport)
    pool.transport.chance = chance
    clients = [another_client(pool) for _ in range(3)]
    clock = Clock()
    watch = drain_watch(pool, clock)
    trained: list[list[str]] = []
    changes = 0

    async def agent(name: str) -> None:
        for n in range(10):
            prompt = f"{name}-{n}"
            for rollout in range(2):
                await asyncio.sleep(0)
                await roll_out(chance.choice(clients), f"{prompt}-{rollout}", prompt, group_size=2)

    async def train() -> None:
        while True:
            trained.extend(await fetch_all(clients[0]))

    training = asyncio.create_task(train())
    agents = [asyncio.create_task(agent(f"agent{n}")) for n in range(8)]
    while not all(task.done() for task in agents):
        await change(pool, chance.randint(1, 6))
        changes += 1
        for _ in range(chance.randint(1, 60)):
            await asyncio.sleep(0)
        clock.now += 100.0
        await watch.look()
    await asyncio.gather(*agents)
    async with asyncio.timeout(30.0):
        while len(trained) < 80:
            await asyncio.sleep(0.01)
    training.cancel()
    trained += await fetch_all(pool)
    assert changes > 3
    expected = [[f"agent{a}-{n}-0", f"agent{a}-{n}-1"] for a in range(8) for n in range(10)]
    assert sorted(map(sorted, trained)) == sorted(expected)


class CountingTransport(LocalTransport):
    calls = 0

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls += 1
        return await super().call(shard, method, args, kwargs)


class ProcessKilled(BaseException):
    """The process that changes the shards ends."""


class InterruptedTransport(LocalTransport):
    """Of a process that is killed before its calls go on."""

    calls_left = 0

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.calls_left:
            raise ProcessKilled
        self.calls_left -= 1
        return await super().call(shard, method, args, kwargs)


class PlanLog(LocalTransport):
    """Notes every plan that any shard has followed."""

    def __init__(self, services: dict[str, ShardService]) -> None:
        super().__init__(services)
        self.layouts: dict[int, set[tuple[Layout, ...]]] = defaultdict(set)

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        answer = await super().call(shard, method, args, kwargs)
        for service in self.services.values():
            plan = await service.plan()
            self.layouts[plan.revision].add(plan.layouts)
        return answer

    def differing(self) -> dict[int, set[tuple[Layout, ...]]]:
        """Plans with the same revision."""
        return {revision: layouts for revision, layouts in self.layouts.items() if len(layouts) > 1}


async def interrupted_change(pool: LocalPool, shards: int, calls: int) -> bool:
    """A change whose process is killed after so many calls. False if it ended before."""
    transport = InterruptedTransport(pool.transport.services)
    transport.calls_left = calls
    chance = random.Random(calls)

    async def start(plan: PoolPlan, changed: PoolPlan) -> None:
        new = [name for name in changed.shard_names() if name not in pool.transport.services]
        pool.add_shards(plan, changed)
        if new and transport.calls_left == 0:  # it is killed in between
            for name in chance.sample(new, chance.randint(0, len(new))):
                del pool.transport.services[name]

    try:
        plan = await pool.transport.call("data_pool", "plan", (), {})
        await reshard(transport, plan, shards, start)
    except ProcessKilled:
        return True
    return False


@pytest.mark.parametrize("after", [2, 6, 8, 11])
async def test_after_an_interrupted_change_another_number_is_what_all_shards_follow(after: int) -> None:
    for calls in count():
        pool = LocalPool(shards=4, transport=PlanLog)
        clients = [another_client(pool) for _ in range(2)]
        await roll_out(clients[0], "a-0", "a", group_size=2)
        was_interrupted = await interrupted_change(pool, 8, calls)
        await roll_out(clients[1], "b-0", "b", group_size=2)
        plan = await change(pool, after)
        services = pool.transport.services
        assert {(await services[name].plan()).layouts for name in plan.shard_names()} == {plan.layouts}
        assert plan.shards == after
        for prompt in ("a", "b"):
            await roll_out(clients[0], f"{prompt}-1", prompt, group_size=2)
        for prompt in PROMPTS[:6]:
            await roll_out(clients[1], prompt, prompt)
        expected = [["a-0", "a-1"], ["b-0", "b-1"], *([prompt] for prompt in PROMPTS[:6])]
        assert sorted(map(sorted, await fetch_all(pool))) == sorted(expected)
        assert pool.transport.differing() == {}
        if not was_interrupted:
            break
    assert calls > 10


async def test_of_changes_at_the_same_time_that_start_the_same_shards_no_two_make_the_same_revision() -> None:
    pool = LocalPool(shards=2, transport=PlanLog)
    other: list[PoolPlan] = []

    async def start(plan: PoolPlan, changed: PoolPlan) -> None:
        pool.add_shards(plan, changed)
        other.append(await change(pool, 4))

    with pytest.raises(Conflict, match="changed by another command"):
        await reshard(pool.transport, await pool.shards.plan(), 8, start)
    assert (await change(pool, 6)).layouts == (*other[0].layouts, Layout(3, 6))
    assert pool.transport.differing() == {}
    for prompt in PROMPTS:
        await roll_out(another_client(pool), prompt, prompt)


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_first_shard_that_has_forgotten_its_plan_makes_no_revision_twice(shards: int) -> None:
    pool = LocalPool(shards=shards, transport=PlanLog)
    started_with = await pool.shards.plan()
    await change(pool, 5)
    del pool.transport.services["data_pool"]  # without a journal it restarts as it was created
    pool.add_shards(started_with)
    assert (await change(pool, 4)).layouts[-2:] == (Layout(2, 5), Layout(3, 4))
    assert pool.transport.differing() == {}


async def test_a_first_shard_that_has_forgotten_its_plan_ends_no_change_of_before() -> None:
    pool, clock = LocalPool(shards=4), Clock()
    watch = drain_watch(pool, clock)
    before = await change(pool, 2)
    newest = await change(pool, 6)
    pool.transport.services["data_pool"] = ShardService(before, "data_pool")
    for _ in range(3):
        await watch.look()
        assert (await pool.transport.services["data_pool"].plan()).layouts == newest.layouts
        clock.now += 50.0


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, prompt: pool.register_trajectory(Registration("t", prompt)),
        lambda pool, prompt: pool.channel_if_open("t", prompt),
        lambda pool, prompt: pool.abort_trajectory("t", prompt),
        lambda pool, prompt: pool.give_reward(RewardGiven(trajectory_uid="t", prompt_uid=prompt, value=1.0)),
        lambda pool, prompt: pool.turns("t", prompt, "digest"),
        lambda pool, prompt: pool.curate(
            Curation(action=CurationAction.MARK, trajectory_uid="t", prompt_uid=prompt, by="a", mark="m")
        ),
        lambda pool, prompt: pool.submit_steps([make_step("t", prompt)], channel="train"),
        lambda pool, prompt: pool.submit_groups(*make_group(prompt, 1)),
    ],
    ids=["register", "channel_if_open", "abort", "reward", "turns", "curate", "steps", "groups"],
)
async def test_a_call_that_no_shard_takes_ends_with_what_differs_and_does_not_spin(
    call: Callable[[LocalPool, str], Awaitable[Any]],
) -> None:
    pool = LocalPool(shards=2, transport=CountingTransport, timeout=1.0)
    plan = await pool.shards.plan()
    await change(pool, 3)
    await pool.shards.agree_with("data_pool")
    pool.transport.services["data_pool-2"] = ShardService(plan.resharded(8), "data_pool-2")
    theirs, ours = Layout(2, 8), Layout(2, 3)
    prompt = next(p for p in map(str, range(1000)) if ours.owner(p) == 2 and theirs.owner(p) != 2)
    pool.transport.calls = 0
    with pytest.raises(
        PoolUnavailable,
        match=r"within 1 s.* data_pool-2 follows revision 2 \(2 -> 8 shards\), and this process revision 2 \(2 -> 3",
    ):
        await call(pool, prompt)
    assert pool.transport.calls < 60


async def test_a_call_that_a_shard_keeps_refusing_for_its_revision_ends_too() -> None:
    class BehindTransport(CountingTransport):
        async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            answer = await super().call(shard, method, args, kwargs)
            if method == "run":
                raise LayoutDiffers("as meant by this test")
            return answer

    pool = LocalPool(shards=2, transport=BehindTransport, timeout=0.3)
    for call in (pool.register_trajectory(Registration("t", "p")), pool.submit_steps([make_step("t", "p")])):
        pool.transport.calls = 0
        with pytest.raises(PoolUnavailable, match=r"within 0.3 s.* follows revision 1 \(2 shards\)"):
            await call
        assert pool.transport.calls < 60
