"""A feature with state of its own is one file, this one: a group that a person pins is neither evicted nor stale."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from stepwell.pool.actors import reshard_pool, start_pool

from rig.actors import pid_of, wait_until_back
from rig.builders import EasyPool, make_step
from stepwell.common.message_format import message
from stepwell.errors import PoolFull
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.staleness import Present
from stepwell.pool.api.watching import why_not_trained
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.operation import MergedOperation, Operation, ShardRoute
from stepwell.pool.slices.all import SLICES
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.records import Group
from stepwell.pool.state.slice import Slice

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

# -- the feature -------------------------------------------------------------------------------------------------------


class Pins(Slice):
    """Who has pinned the groups of which prompt."""

    name = "pins"

    def __init__(self, journal: StateJournal) -> None:
        super().__init__(journal)
        self.pins: dict[str, str] = {}
        """The person by the prompt_uid."""

    def pin(self, prompt_uid: str, by: str) -> None:
        self.pins[prompt_uid] = by
        self._save(prompt_uid, by)

    def unpin(self, prompt_uid: str) -> None:
        if self.pins.pop(prompt_uid, None) is not None:
            self._remove(prompt_uid)

    def dump(self) -> Mapping[str, Any]:
        return self.pins

    def load(self, rows: Mapping[str, Any]) -> None:
        self.pins.update(rows)

    def keeps(self, group: Group) -> str:
        by = self.pins.get(group.prompt_uid)
        return f"pinned by {by}" if by else ""

    def shared(self) -> Mapping[str, Any]:
        return self.pins

    def merge(self, rows: Mapping[str, Any]) -> None:
        for prompt_uid, by in rows.items():
            self.pin(prompt_uid, by)

    def remove(self, is_wanted: Callable[[str, str, float], bool]) -> int:
        found = [prompt_uid for prompt_uid in self.pins if is_wanted("", prompt_uid, 0.0)]
        for prompt_uid in found:
            self.unpin(prompt_uid)
        return len(found)


@message
@dataclass(frozen=True, slots=True)
class PinGroup(Operation[None]):
    prompt_uid: str
    by: str
    """Empty: it is not pinned any more."""
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.prompt_uid

    def run(self, shard: "Shard") -> None:
        state = shard.pool.state
        pins = state.slice_of(Pins)
        if self.by:
            pins.pin(self.prompt_uid, self.by)
        else:
            pins.unpin(self.prompt_uid)
        state.show_again(one for one in state.trajectories.values() if one.group.prompt_uid == self.prompt_uid)


@message
@dataclass(frozen=True, slots=True)
class ReadPins(MergedOperation[dict[str, str], dict[str, str]]):
    """Who has pinned which prompt, in the whole pool."""

    changes = False

    def run(self, shard: "Shard") -> dict[str, str]:
        return dict(shard.pool.state.slice_of(Pins).pins)

    def merge(self, parts: Mapping[str, dict[str, str]], missing: tuple[str, ...]) -> dict[str, str]:
        assert not missing, f"{missing} did not answer"
        return {prompt_uid: by for part in parts.values() for prompt_uid, by in part.items()}


# -- its tests ---------------------------------------------------------------------------------------------------------

PINNED = (*SLICES, Pins)


async def rollout(client: PoolClient, prompt: str, version: int, *, size: int = 1) -> None:
    await client.register_trajectory(Registration(f"t-{prompt}", prompt, group_size=size))
    step = make_step(f"t-{prompt}", prompt, uid=f"s-{prompt}", policy_version=version)
    assert await client.submit_steps([step]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(f"t-{prompt}", prompt, 1.0) is EndResult.COMPLETED


def prompts_of(plan: PoolPlan, shard: str, count: int) -> list[str]:
    names = (f"p{n}" for n in range(1000))
    return [name for name in names if plan.owners(name) == (shard,)][:count]


async def test_a_pin_outlives_its_shard_and_keeps_its_group_while_others_are_dropped(
    namespace: str, tmp_path: Path
) -> None:
    plan = PoolPlan(shards=2, journal=str(tmp_path), limits=Limits(max_queue_size=3, max_staleness=0))
    await asyncio.to_thread(start_pool, plan, namespace, slices=PINNED)
    client, (first, second) = PoolClient(plan.name, namespace), plan.shard_names()
    pinned, evicted, *fresh = prompts_of(plan, first, 4)
    other_pinned, stale, open_pinned = prompts_of(plan, second, 3)
    for prompt in (pinned, evicted, other_pinned, stale):
        await rollout(client, prompt, 0)
    await rollout(client, open_pinned, 0, size=2)
    pins = {pinned: "ana", other_pinned: "bo", open_pinned: "bo"}
    await asyncio.gather(*(client.ask(PinGroup(prompt, by)) for prompt, by in pins.items()))
    killed = await asyncio.to_thread(pid_of, first, namespace)
    os.kill(killed, signal.SIGKILL)

    await asyncio.to_thread(wait_until_back, first, namespace, killed)
    await client.set_policy_version(1, check=False)
    assert await client.ask(ReadPins(), timeout=60.0) == pins
    for prompt in fresh:
        await rollout(client, prompt, 1)

    (snapshot,) = [one for one in (await client.changes({})).snapshots if one.prompt_uid == pinned]
    why = why_not_trained(snapshot, plan.limits, Present(1, 0.0))
    assert why == "It is ready and waits for a trainer. Its group is neither evicted nor stale: pinned by ana."
    (waiting,) = [one for one in (await client.preview("train")).waiting if one.prompt_uid == open_pinned]
    assert waiting.why == ("1 of 2 rollouts are complete, 1 not started; it is neither evicted nor stale: pinned by bo")

    batch = await client.fetch_batch(4, timeout=60.0)
    assert sorted(batch.columns.prompt_uids) == sorted([pinned, other_pinned, *fresh])
    dropped = (await client.stats()).channels["train"].dropped
    assert {cause: count.steps for cause, count in dropped.items()} == {"evicted": 1, "stale": 1}

    await client.ask(PinGroup(open_pinned, ""))
    del pins[open_pinned]
    await asyncio.to_thread(partial(reshard_pool, plan.name, 3, namespace, slices=PINNED))
    assert await client.shards.at(f"{plan.name}-2").shared_rows() == {"pins": pins}


async def test_a_row_is_gone_when_what_it_says_is_gone(namespace: str, tmp_path: Path) -> None:
    plan = PoolPlan(journal=str(tmp_path))
    await asyncio.to_thread(start_pool, plan, namespace, slices=PINNED)
    client = PoolClient(plan.name, namespace)
    for by in ("ana", "bo", ""):
        await client.ask(PinGroup("p", by))
    await client.ask(PinGroup("q", "ana"))
    killed = await asyncio.to_thread(pid_of, plan.name, namespace)
    os.kill(killed, signal.SIGKILL)
    await asyncio.to_thread(wait_until_back, plan.name, namespace, killed)
    assert await client.ask(ReadPins(), timeout=60.0) == {"q": "ana"}


def test_what_is_pinned_may_fill_the_memory_and_then_nothing_more_is_taken() -> None:
    pool = EasyPool(Limits(max_bytes=40_000), slices=PINNED)
    pins = pool.state.slice_of(Pins)
    for n in range(4):
        pins.pin(f"p{n}", "ana")
        pool.rollout(f"t{n}", f"p{n}", response_ids=range(500))
    pool.rollout("t4", "p4", response_ids=range(500))
    for n in range(5, 40):
        pool.rollout(f"t{n}", f"p{n}", response_ids=range(200))
    held = {group.prompt_uid for group in pool.state.channels["train"].groups.values()}
    assert held > {"p0", "p1", "p2", "p3"}
    assert "p4" not in held
    for prompt_uid in held:
        pins.pin(prompt_uid, "ana")
    with pytest.raises(PoolFull, match="full of groups that are kept"):
        for n in range(40, 200):
            pins.pin(f"p{n}", "ana")
            pool.rollout(f"t{n}", f"p{n}", response_ids=range(200))


def test_the_old_tokens_of_a_pinned_group_are_not_masked() -> None:
    pool = EasyPool(Limits(max_staleness=0, on_stale="mask"), slices=PINNED)
    pool.state.slice_of(Pins).pin("p", "ana")
    for uid, prompt in (("t", "p"), ("u", "q")):
        pool.rollout(uid, prompt)
    pool.policy_version = 3
    taken = pool.take(1)
    assert taken is not None
    assert [[(step.prompt_uid, step.response_mask) for step in group] for group in taken] == [[("p", None)]]
    assert pool.take(1) is None
