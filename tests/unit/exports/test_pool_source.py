"""Out of a running pool: listed, then read page by page."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from stepwell.exports.pool_transfer import ATTEMPTS, PAGE_TOKENS, PAGE_TRAJECTORIES, list_pool, read_groups

from stepwell.common.async_calls import Backoff
from stepwell.errors import PoolUnavailable
from stepwell.exports.selection import Selection
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.steps.step import Step
from tests.unit.exports.stored import ShownPool, summary, turns

AT_ONCE = Backoff(first=0.0, longest=0.0)


async def exported(
    pool: ShownPool, selection: Selection | None = None, max_trajectories: int = PAGE_TRAJECTORIES
) -> list[list[str]]:
    """The trajectories of each group, one uid a step."""
    listing = await list_pool(pool, selection or Selection())
    return [group.columns.trajectory_uids async for group in read_groups(pool, listing, AT_ONCE, max_trajectories)]


def steps_of(pages: Sequence[Sequence[TrajectorySnapshot]]) -> list[Step]:
    names = dict.fromkeys((one.trajectory_uid, one.prompt_uid) for page in pages for one in page)
    return [step for uid, prompt in names for step in turns(uid, 2, prompt)]


async def test_groups_come_whole_and_oldest_first_however_they_were_told_of() -> None:
    pages = [
        [summary("d", "q", group=2), summary("b", group=1)],
        [summary("c", "q", group=2), summary("a", group=1)],
    ]
    assert await exported(ShownPool(pages, steps_of(pages))) == [["a", "a", "b", "b"], ["c", "c", "d", "d"]]


async def test_a_group_keeps_its_source_and_channel() -> None:
    pages = [[summary("a", source="maths", channel="validation")]]
    pool = ShownPool(pages, steps_of(pages))
    (group,) = [group async for group in read_groups(pool, await list_pool(pool, Selection()))]
    assert (group.source, group.channel) == ("maths", "validation")


async def test_what_is_not_to_be_kept_is_not_exported() -> None:
    pages = [[summary("a"), summary("b")]]
    steps = [
        replace(step, metadata={"consent": {"keep": False}}) if step.trajectory_uid == "a" else step
        for step in steps_of(pages)
    ]
    assert await exported(ShownPool(pages, steps)) == [["b", "b"]]


async def test_what_has_changed_meanwhile_counts_as_it_is_last_told() -> None:
    pages = [[summary("a", reward=1.0), summary("b", reward=1.0)], [summary("a", reward=0.0)]]
    assert await exported(ShownPool(pages, steps_of(pages)), Selection(reward_min=1.0)) == [["b", "b"]]


async def test_a_trajectory_that_changed_its_group_is_in_one() -> None:
    pages = [[summary("a", group=1), summary("b", group=1)], [summary("a", group=7)]]
    assert await exported(ShownPool(pages, steps_of(pages))) == [["b", "b"], ["a", "a"]]


async def test_a_shard_that_begins_anew_voids_what_was_known_of_it() -> None:
    pages = [[summary("a"), summary("b")], [summary("b")]]
    pool = ShownPool(pages, steps_of(pages))
    pool.anew = {1: ["s"]}
    assert await exported(pool) == [["b", "b"]]


async def test_what_has_left_before_its_turn_is_missing_and_nothing_else() -> None:
    pages = [[summary("a"), summary("b"), summary("c", "q", group=2)]]
    gone = [step for step in steps_of(pages) if step.trajectory_uid not in ("a", "c")]
    pool = ShownPool(pages, gone)
    assert len(await list_pool(pool, Selection())) == 3
    assert await exported(pool) == [["b", "b"]]


async def test_what_has_no_sound_step_is_not_asked_for() -> None:
    pages = [[summary("a", steps=2, quarantined=2), summary("b", steps=2, quarantined=1), summary("c", steps=0)]]
    pool = ShownPool(pages, steps_of(pages))
    await exported(pool)
    assert pool.asked == [["b"]]


async def test_a_shard_that_restarts_is_waited_for_but_not_without_end() -> None:
    pool = ShownPool([[summary("a")]], turns("a"))
    pool.away = ATTEMPTS - 1
    assert await exported(pool) == [["a"]]
    pool.away = ATTEMPTS
    with pytest.raises(PoolUnavailable, match="restarting"):
        await exported(pool)


async def test_what_is_quarantined_stays() -> None:
    pool = ShownPool([[summary("a")]], [*turns("a", 2), *turns("a", 1, quarantine="cut_short: no end")])
    assert await exported(pool) == [["a", "a"]]


async def test_no_page_asks_for_much_and_none_for_part_of_a_group() -> None:
    many = [summary(f"{n}{m}", f"p{n}", group=n) for n in range(4) for m in "ab"]
    long = [summary("long", "p9", group=9, tokens=PAGE_TOKENS), summary("next", "p10", group=10)]
    pool = ShownPool([[*many, *long]], steps_of([[*many, *long]]))
    await exported(pool, max_trajectories=3)
    assert pool.asked == [["0a", "0b", "1a", "1b"], ["2a", "2b", "3a", "3b"], ["long"], ["next"]]


async def test_a_page_is_of_one_shard() -> None:
    pages = [[summary("a", shard="s-1"), summary("b", "q", shard="s")]]
    pool = ShownPool(pages, steps_of(pages))
    await exported(pool)
    assert pool.asked == [["b"], ["a"]]
