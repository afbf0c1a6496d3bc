"""A pool of two shards, watched and curated. tests/integration/pool kills the shards meanwhile."""

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.errors import FetchTimeout
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.watching import Cursor, TrajectorySnapshot
from stepwell.pool.slices.curation import Curation, CurationAction, CurationOutcome
from stepwell.steps.columns import unpack

GROUPS = [f"p{n}" for n in range(6)]
"""On both shards."""
START = 1_790_000_000.0


@pytest.fixture
def client() -> LocalPool:
    assert {Layout(1, 2).owner(prompt) for prompt in GROUPS} == {0, 1}
    client = LocalPool(shards=2, group_size=2, history_size=20)
    client.advance_to(START)
    return client


async def fill(client: LocalPool, prompts: list[str] = GROUPS) -> None:
    """Groups of two, `a-PROMPT` and `b-PROMPT`."""
    for uid, prompt in ((f"{side}-{prompt}", prompt) for prompt in prompts for side in "ab"):
        await client.register_trajectory(Registration(uid, prompt))
        assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
        assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


async def reject(client: LocalPool, uid: str) -> CurationOutcome:
    prompt = uid.split("-")[1]
    return await client.curate(
        Curation(action=CurationAction.REJECT, trajectory_uid=uid, prompt_uid=prompt, by="ana", why="wrong")
    )


async def relabel(client: LocalPool, uid: str, reward: float, by: str = "ana") -> CurationOutcome:
    prompt = uid.split("-")[1]
    curation = Curation(action=CurationAction.RELABEL, trajectory_uid=uid, prompt_uid=prompt, by=by, reward=reward)
    return await client.curate(curation)


async def all_of_it(client: LocalPool, limit: int = 4) -> dict[str, TrajectorySnapshot]:
    """As a watcher reads it, page by page."""
    cursors: dict[str, Cursor] = {}
    found: dict[str, TrajectorySnapshot] = {}
    more = True
    while more:
        changes = await client.changes(cursors, limit)
        cursors, more = dict(changes.cursors), changes.more
        found |= {summary.trajectory_uid: summary for summary in changes.snapshots}
    return found


async def test_a_rejected_trajectory_is_in_no_later_batch_and_a_relabelled_reward_is(client: LocalPool) -> None:
    await fill(client)
    assert await reject(client, "a-p0") is CurationOutcome.DONE
    assert await relabel(client, "b-p1", -0.5) is CurationOutcome.DONE
    leased = await client.fetch_batch(6, lease=60.0)
    assert "a-p0" not in leased.columns.trajectory_uids
    assert await reject(client, "a-p2") is CurationOutcome.DONE
    assert await relabel(client, "b-p3", -0.25) is CurationOutcome.DONE
    await client.nack(leased)
    again = await client.fetch_batch(6)
    rewards = {step.trajectory_uid: step.reward for step in unpack(again.columns, copy=False)}
    assert rewards.keys() == {f"{side}-{prompt}" for side in "ab" for prompt in GROUPS} - {"a-p0", "a-p2"}
    assert (rewards["b-p1"], rewards["b-p3"]) == (-0.5, -0.25)
    assert await reject(client, "a-p4") is CurationOutcome.DONE
    assert await relabel(client, "b-p5", 0.125) is CurationOutcome.DONE
    await fill(client, [f"q{n}" for n in range(12)])
    mixed = await client.fetch_batch(12, history=0.9)
    assert mixed.from_history_G.sum() == 6
    rewards = {step.trajectory_uid: step.reward for step in unpack(mixed.columns, copy=False)}
    assert not rewards.keys() & {"a-p0", "a-p2", "a-p4"}
    assert rewards["b-p5"] == 0.125
    assert (await client.stats()).channels["train"].dropped["rejected"].steps == 2


@pytest.mark.parametrize("unit", ["trajectories", "steps"])
async def test_it_holds_for_trajectories_and_for_steps(client: LocalPool, unit: str) -> None:
    await fill(client)
    await reject(client, "a-p0")
    leased = await client.fetch_batch(11, unit=unit, lease=60.0)
    await reject(client, "b-p1")
    await client.nack(leased)
    batch = await client.fetch_batch(10, unit=unit)
    assert not {"a-p0", "b-p1"} & set(batch.columns.trajectory_uids)
    with pytest.raises(FetchTimeout):
        await client.fetch_batch(1, unit=unit, timeout=0.05)


async def test_a_watcher_follows_all_shards_and_reads_what_it_wants(client: LocalPool) -> None:
    await fill(client)
    found = await all_of_it(client)
    assert {summary.state.value for summary in found.values()} == {"ready"}
    assert {summary.shard for summary in found.values()} == {"data_pool", "data_pool-1"}
    first = await client.changes({})
    assert (sorted(first.reset_shards), len(first.snapshots)) == (["data_pool", "data_pool-1"], 12)
    quiet = await client.changes(first.cursors)
    assert (quiet.snapshots, quiet.reset_shards, quiet.more) == ([], [], False)
    await client.give_reward(RewardGiven(trajectory_uid="a-p3", prompt_uid="p3", value=0.5))
    changed = await client.changes(quiet.cursors)
    assert [(summary.trajectory_uid, summary.reward) for summary in changed.snapshots] == [("a-p3", 0.5)]
    uids = [("b-p4", "p4"), ("a-p0", "p0"), ("nobody", "p0"), ("a-p5", "p5"), ("b-p0", "p0")]
    assert (await client.read(uids)).trajectory_uids == ["b-p4", "a-p0", "a-p5", "b-p0"]
    assert len(await client.read([])) == 0


async def test_the_series_of_all_shards_come_as_one(client: LocalPool) -> None:
    await fill(client)
    await client.fetch_batch(6)
    series = await client.series(seconds=900)
    train = series.channels["train"]
    assert series.interval == 5.0
    assert abs(series.ends[-1] - START) <= 10
    assert (sum(train.steps), sum(train.trained_steps), sum(train.rewards)) == (12, 12, 12)
    assert sum(sum(interval.values()) for interval in train.staleness) == 12


async def test_a_preview_in_strict_order_waits_for_a_shard_that_is_away_as_a_fetch_does(client: LocalPool) -> None:
    await fill(client)
    await client.nack(await client.fetch_batch(1, timeout=5, lease=60, order="strict"))
    assert (await client.preview("train")).is_complete
    client.transport.shards_away.add("data_pool-1")
    found = await client.preview("train")
    assert (found.is_complete, found.missing) == (False, ("data_pool-1",))
    assert found.waits_for == "an answer of data_pool-1, which may hold what is older"
    with pytest.raises(FetchTimeout, match="data_pool-1: it does not answer"):
        await client.fetch_batch(1, timeout=0.05, order="strict")
