"""Out of a pool, into another, and out again: bit for bit, however often."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rig.builders import make_group, make_step
from rig.local_pool import LocalPool
from stepwell.errors import BadRequest
from stepwell.pool.client import PoolClient
from stepwell.pool.client.batch import Batch
from stepwell.pool.slices.curation import Curation, CurationAction
from tests.integration.exports.commands import export, import_into, new_pool
from tests.integration.exports.rollouts import fill

KINDS = (".parquet", ".jsonl", "")
STEPS = 3_000
"""A shard in this process takes them in seconds; a Ray actor takes a minute."""


async def test_what_was_exported_and_imported_is_exported_bit_for_bit(tmp_path: Path) -> None:
    first = LocalPool(shards=2)
    held = await exported(first, STEPS, tmp_path)
    for kind in KINDS:
        pool = LocalPool(shards=2)
        assert (await import_into(pool, tmp_path / f"a{kind}"))[1] == f"steps: {held:,} accepted"
        await export(pool, tmp_path / f"b{kind}.parquet")
        assert (tmp_path / f"b{kind}.parquet").read_bytes() == (tmp_path / "a.parquet").read_bytes()
    await export(pool, tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    await export(None, tmp_path / "c.parquet", **{"from": str(tmp_path / "a")})
    assert (tmp_path / "c.parquet").read_bytes() == (tmp_path / "a.parquet").read_bytes()


async def test_the_same_over_ray(namespace: str, tmp_path: Path) -> None:
    held = await exported(new_pool("first", namespace, shards=1), 200, tmp_path)
    second = new_pool("second", namespace, shards=1)
    assert (await import_into(second, tmp_path / "a.parquet"))[1] == f"steps: {held:,} accepted"
    await export(second, tmp_path / "b.parquet")
    assert (tmp_path / "b.parquet").read_bytes() == (tmp_path / "a.parquet").read_bytes()


async def exported(pool: PoolClient, steps: int, folder: Path) -> int:
    """Fill the pool and export it in all forms. Returns how many steps it holds."""
    await fill(pool, steps)
    held = sum(channel.held.steps for channel in (await pool.stats()).channels.values())
    for kind in KINDS:
        (said,) = await export(pool, folder / f"a{kind}")
        assert f"{held:,} rows" in said
    assert held >= 0.9 * steps
    return held


async def test_a_trainer_gets_the_same_groups_from_both(tmp_path: Path) -> None:
    first, second = LocalPool(), LocalPool()
    await fill(first, 400, seed=1)
    await export(first, tmp_path / "a.parquet", state="ready")
    await import_into(second, tmp_path / "a.parquet")
    ours, theirs = await all_ready(first), await all_ready(second)
    assert len(ours) > 20
    assert told(ours) == told(theirs)
    assert ours.sources == theirs.sources


async def all_ready(pool: PoolClient) -> Batch:
    ready = (await pool.stats()).channels["train"].ready_groups
    return await pool.fetch_batch(ready, min_exactness="retokenized", untrainable=True)


def told(batch: Batch) -> list[list[tuple[str, int, bytes, float | None, str, int]]]:
    """Group by group, in order; within a group by name."""
    return [
        sorted(
            (s.trajectory_uid, s.step_index, s.response_ids.tobytes(), s.reward, s.reward_source, s.reward_revision)
            for trajectory in group
            for s in trajectory
        )
        for group in batch.groups()
    ]


async def test_a_second_import_changes_nothing(tmp_path: Path) -> None:
    pool = LocalPool(shards=2)
    for prompt in ("p", "q"):
        await pool.submit_groups(*make_group(prompt, 2))
        await pool.curate(mark(prompt, CurationAction.MARK))
    await export(pool, tmp_path / "a.jsonl")
    for prompt in ("p", "q"):
        await pool.curate(mark(prompt, CurationAction.UNMARK))
    await export(pool, tmp_path / "b.jsonl")
    await pool.fetch_batch(1)
    (trained,) = {"p", "q"} - {one.prompt_uid for one in (await pool.changes({})).snapshots if one.state == "ready"}

    assert (await import_into(pool, tmp_path / "a.jsonl"))[1] == "steps: 2 duplicate, 2 late"
    await export(pool, tmp_path / "c.jsonl")
    left = [line for line in (tmp_path / "b.jsonl").read_text().splitlines() if f'"prompt_uid":"{trained}"' not in line]
    again = (tmp_path / "c.jsonl").read_text().splitlines()
    assert [line.split('"source"')[1] for line in again] == [line.split('"source"')[1] for line in left]


def mark(prompt: str, action: CurationAction) -> Curation:
    return Curation(action=action, trajectory_uid=f"{prompt}-0", prompt_uid=prompt, by="ann", mark="good")


async def test_what_people_decided_goes_with_it(tmp_path: Path) -> None:
    first, second = LocalPool(), LocalPool()
    await first.submit_groups(*make_group("p", 3))
    decisions = [
        Curation(action=CurationAction.REJECT, trajectory_uid="p-0", prompt_uid="p", by="ann"),
        Curation(action=CurationAction.RELABEL, trajectory_uid="p-1", prompt_uid="p", by="ann", reward=0.25),
        Curation(action=CurationAction.MARK, trajectory_uid="p-2", prompt_uid="p", by="ann", mark="good"),
    ]
    for decision in decisions:
        await first.curate(decision)
    await export(first, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["trajectory_uid"].to_pylist() == ["p-1", "p-2"]
    assert table["reward"].to_pylist() == [0.25, 1.0]
    assert table["reward_source"][0].as_py() == "curation:ann"

    await import_into(second, tmp_path / "a.parquet")
    found = {one.trajectory_uid: one for one in (await second.changes({})).snapshots}
    assert found["p-2"].marks == ("good",)
    assert (found["p-1"].reward, found["p-1"].group_size) == (0.25, 2)
    assert {one.state for one in found.values()} == {"ready"}


async def test_an_export_goes_on_while_a_trainer_takes(tmp_path: Path) -> None:
    pool = LocalPool()
    for n in range(4):
        await pool.submit_groups(*make_group(f"p{n}", 2))
    batch = await pool.fetch_batch(1, lease=60)
    await pool.fetch_batch(1)
    said = await export(pool, tmp_path / "a.parquet")
    assert "2 trajectories left the pool before they were read" in said[1]
    assert set(pq.read_table(tmp_path / "a.parquet")["prompt_uid"].to_pylist()) == {"p0", "p2", "p3"}
    await pool.ack(batch)


async def test_filters_hold_in_a_pool_as_in_a_file(tmp_path: Path) -> None:
    pool = LocalPool(shards=2)
    await fill(pool, 300, seed=2, completed=1.0)  # a file does not have the reward of an open trajectory
    await export(pool, tmp_path / "all.parquet")
    bounds = {"reward_min": 0.0, "version_max": 7, "channel": "train", "source": "maths"}
    await export(pool, tmp_path / "a.parquet", **bounds)
    await export(None, tmp_path / "b.parquet", **{"from": str(tmp_path / "all.parquet")}, **bounds)
    assert 0 < len(pq.read_table(tmp_path / "a.parquet")) < len(pq.read_table(tmp_path / "all.parquet"))
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


async def test_a_limit_is_kept_and_nothing_found_is_said(tmp_path: Path) -> None:
    pool = LocalPool()
    await pool.submit_groups(*make_group("p", 3))
    await export(pool, tmp_path / "a.jsonl", limit=2)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2
    with pytest.raises(BadRequest, match="nothing was written"):
        await export(pool, tmp_path / "b.jsonl", reward_min=5.0)
    assert os.listdir(tmp_path) == ["a.jsonl"]


async def test_an_open_trajectory_stays_open(tmp_path: Path) -> None:
    first, second = LocalPool(), LocalPool()
    await first.submit_steps([make_step("t", "p", uid="u")], channel="train")
    await export(first, tmp_path / "a.parquet")
    await import_into(second, tmp_path / "a.parquet", channel="replay")
    (found,) = (await second.changes({})).snapshots
    assert (found.state, found.channel, found.steps) == ("open", "replay", 1)
    assert await second.complete_trajectory("t", "p", 1.0) == "completed"
