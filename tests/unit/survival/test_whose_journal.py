"""D5, D10, D12: a shard opens its own journal and no other, never an empty one instead, and only one shard does."""

from dataclasses import replace
from pathlib import Path

import pytest
from stepwell.pool.shard.journal_store import SCHEMA_VERSION, JournalFailed, JournalHeader, JournalIdentity

from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import Layout, PoolPlan
from stepwell.pool.shard.placement import find_journals, place_shards
from stepwell.pool.shard.service import ShardService
from tests.unit.pool.shard.journals import Place, header_of, open_journal

OURS = JournalIdentity(pool="data_pool", pool_uid="a1", shards=4, index=1)


def test_a_journal_that_must_exist_is_not_created(place: Place) -> None:
    with pytest.raises(JournalRefused, match="is missing or empty.*--new-journals"):
        open_journal(place, OURS, must_exist=True)
    with pytest.raises(KeyError):
        header_of(place)


def test_the_folder_of_a_journal_that_must_exist_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "volume" / "data_pool-1.sqlite"
    with pytest.raises(JournalRefused, match="mount its volume"):
        open_journal(path, OURS, must_exist=True)
    assert not path.parent.exists()


def test_an_empty_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "data_pool-1.sqlite"
    path.touch()
    with pytest.raises(JournalRefused, match="is missing or empty"):
        open_journal(path, OURS, must_exist=True)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(OURS, pool="another"), "belongs to pool 'data_pool', not to 'another'"),
        (replace(OURS, pool_uid="b2"), "belongs to another pool of the name 'data_pool', created at another time"),
        (replace(OURS, index=3), "is that of shard 1, not of shard 3"),
    ],
)
def test_the_journal_of_another_pool_or_shard_is_refused_unchanged(
    place: Place, other: JournalIdentity, why: str
) -> None:
    open_journal(place, OURS).close()
    before = place.read_bytes() if isinstance(place, Path) else b""
    with pytest.raises(JournalRefused, match=why):
        open_journal(place, other)
    assert not before or (isinstance(place, Path) and place.read_bytes() == before)
    assert header_of(place) == JournalHeader(SCHEMA_VERSION, 1, OURS)
    open_journal(place, OURS, must_exist=True).close()


def test_a_journal_that_does_not_say_whose_it_is_is_taken_over(place: Place) -> None:
    open_journal(place, None).close()
    open_journal(place, OURS, must_exist=True).close()
    assert header_of(place) == JournalHeader(SCHEMA_VERSION, 2, OURS)


def test_a_shard_that_knows_no_uid_takes_that_of_the_journal(place: Place) -> None:
    open_journal(place, OURS).close()
    open_journal(place, replace(OURS, pool_uid="")).close()
    assert header_of(place).identity == OURS


def test_what_is_rescued_from_damage_keeps_its_identity(place: Place) -> None:
    journal = open_journal(place, OURS)
    journal.store.rewrite([])
    journal.close()
    assert header_of(place).identity == OURS
    open_journal(place, OURS, must_exist=True).close()


def test_a_file_is_open_in_one_process(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "pool.sqlite", OURS)
    with pytest.raises(JournalRefused, match="is open in another process"):
        open_journal(tmp_path / "pool.sqlite", OURS)
    journal.close()
    open_journal(tmp_path / "pool.sqlite", OURS).close()


def test_without_a_lock_the_shard_that_was_replaced_cannot_commit(place: Place) -> None:
    first = open_journal(place, OURS)
    if isinstance(place, Path):
        place.with_name(place.name + ".lock").unlink()
    second = open_journal(place, OURS)
    first.note_archived("first")
    with pytest.raises(JournalFailed, match="was opened by another process"):
        first.commit_rows()
    second.note_archived("second")
    second.commit_rows()
    assert second.archived() == ["second"]
    first.store.close()
    second.close()


def plan(shards: int) -> PoolPlan:
    return PoolPlan(shards=shards, journal="/journals")


def journals(count: int, uid: str | None = "a1", epoch: int = 1) -> dict[str, JournalHeader]:
    names = PoolPlan(shards=count).shard_names()
    if uid is None:
        return {name: JournalHeader(SCHEMA_VERSION, epoch) for name in names}
    whole = JournalIdentity(pool="data_pool", pool_uid=uid, shards=count, index=0)
    return {name: JournalHeader(SCHEMA_VERSION, epoch, replace(whole, index=i)) for i, name in enumerate(names)}


def test_a_pool_without_journals_is_new_and_stays_where_it_is_created() -> None:
    placed, must_exist = place_shards(plan(2), {"head": {}, "other": {}}, "head")
    assert (placed.nodes, must_exist) == (("head", "head"), False)
    assert placed.uid


def test_shards_go_to_their_journals() -> None:
    whole = journals(2)
    found = {"head": {}, "x": {"data_pool": whole["data_pool"]}, "y": {"data_pool-1": whole["data_pool-1"]}}
    placed, must_exist = place_shards(plan(2), found, "head")
    assert (placed.uid, placed.nodes, must_exist) == ("a1", ("x", "y"), True)


def test_of_two_copies_the_one_that_was_opened_last_counts() -> None:
    placed, _ = place_shards(plan(1), {"head": journals(1, epoch=3), "x": journals(1, epoch=7)}, "head")
    assert placed.nodes == ("x",)
    placed, _ = place_shards(plan(1), {"x": journals(1), "head": journals(1), "y": journals(1)}, "head")
    assert placed.nodes == ("head",)


@pytest.mark.parametrize("shards", [2, 8])
def test_a_pool_has_the_shards_that_its_journals_name(shards: int) -> None:
    placed, must_exist = place_shards(plan(shards), {"head": journals(4)}, "head")
    assert (placed.shards, placed.nodes, must_exist) == (4, ("head",) * 4, True)


def test_another_number_is_refused_if_the_journals_do_not_say_how_many_there_are() -> None:
    with pytest.raises(JournalRefused, match="a pool of 4 shards, and this one is to have 2. Use --shards 4 first"):
        place_shards(plan(2), {"head": journals(4, None)}, "head")
    with pytest.raises(JournalRefused, match="4 of 8 shards"):
        place_shards(plan(8), {"head": journals(4, None)}, "head")


def test_a_change_of_the_shards_that_was_interrupted_goes_on() -> None:
    changing = (Layout(1, 2), Layout(2, 4))
    found = journals(4)
    found["data_pool"] = replace(found["data_pool"], layouts=changing)
    placed, must_exist = place_shards(plan(2), {"head": found}, "head")
    assert (placed.layouts, len(placed.nodes), must_exist) == (changing, 4, True)
    del found["data_pool-3"]
    with pytest.raises(JournalRefused, match="3 of 4 shards; missing: data_pool-3"):
        place_shards(plan(4), {"head": found}, "head")


def test_the_journals_of_shards_that_have_left_or_have_not_joined_are_no_part_of_the_pool() -> None:
    found = journals(4)
    found["data_pool"] = replace(found["data_pool"], layouts=(Layout(3, 2),))
    placed, _ = place_shards(plan(4), {"head": found}, "head")
    assert (placed.layouts, placed.shard_names()) == ((Layout(3, 2),), ("data_pool", "data_pool-1"))


def test_a_missing_journal_is_refused_unless_it_is_given_up() -> None:
    found = journals(4)
    del found["data_pool-2"]
    with pytest.raises(JournalRefused, match=r"3 of 4 shards; missing: data_pool-2\..*--new-journals"):
        place_shards(plan(4), {"head": found}, "head")
    placed, must_exist = place_shards(plan(4), {"x": found}, "head", new_journals=True)
    assert (placed.uid, placed.nodes, must_exist) == ("a1", ("x", "x", "head", "x"), False)


def test_journals_of_two_pools_are_refused() -> None:
    found = {"x": {"data_pool": journals(2, "a1")["data_pool"]}, "y": {"data_pool-1": journals(2, "b2")["data_pool-1"]}}
    with pytest.raises(JournalRefused, match="are those of 2 pools"):
        place_shards(plan(2), found, "x")


def test_journals_are_found_by_the_name_of_their_pool(tmp_path: Path) -> None:
    for name in ("data_pool", "data_pool-1", "data_pool_2", "data_pool-x"):
        open_journal(tmp_path / f"{name}.sqlite", OURS).close()
    (tmp_path / "data_pool-2.sqlite").touch()
    assert find_journals(str(tmp_path), "data_pool") == {
        "data_pool": JournalHeader(SCHEMA_VERSION, 1, OURS),
        "data_pool-1": JournalHeader(SCHEMA_VERSION, 1, OURS),
    }


async def test_a_journal_names_the_layouts_that_its_shard_has_followed_last(place: Place) -> None:
    journal = open_journal(place, OURS)
    shard = ShardService(PoolPlan(shards=4, min_free_bytes=0), "data_pool-1", journal=journal)
    await shard.adopt_plan((await shard.plan()).resharded(6))
    journal.close()
    assert header_of(place).layouts == (Layout(1, 4), Layout(2, 6))
