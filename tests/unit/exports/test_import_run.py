"""Back into a pool: what is sent for stored groups."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
from stepwell.exports.pool_transfer import TransferProgress, common_metadata, import_groups, message

from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.errors import BadRequest
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.steps.groups import StepGroup
from tests.unit.exports.stored import stored, turns


def test_a_group_has_as_many_places_as_trajectories() -> None:
    group = stored(turns("a", 2), turns("b"), source="maths", channel="validation")
    columns, registrations = message([group], set(), None)
    assert registrations == [Registration(uid, "p", "validation", 2, {}, "maths") for uid in ("a", "b")]
    assert columns.uids == ["a-0", "a-1", "b-0"]


def test_what_is_known_is_not_registered_again_and_takes_no_place() -> None:
    known = {("a", "p")}
    _, registrations = message([stored(turns("a"), turns("b"), turns("c"))], known, None)
    assert [(wanted.trajectory_uid, wanted.group_size) for wanted in registrations] == [("b", 2), ("c", 2)]
    assert known == {("a", "p"), ("b", "p"), ("c", "p")}


def test_metadata_that_all_steps_share_is_the_trajectorys() -> None:
    steps = [make_step(step_index=n, metadata={"turn": n, "answer": "4", "marks": ["good"]}) for n in range(2)]
    columns, (wanted,) = message([stored(steps)], set(), None)
    assert wanted.metadata == {"answer": "4", "marks": ["good"]}
    assert columns.metadata == [{"turn": 0}, {"turn": 1}]


def test_what_python_takes_for_equal_is_not_the_same_to_json() -> None:
    assert common_metadata([{"a": 1, "b": 0}, {"a": True, "b": 0}]) == {"b": 0}
    assert common_metadata([{"a": 1}, {"a": 1.0}]) == {}
    assert common_metadata([{"a": None}, {}]) == {}


def test_a_file_that_names_no_channel_is_not_guessed_into_one() -> None:
    group = stored(turns("a"), channel="")
    with pytest.raises(BadRequest, match="give --channel"):
        message([group], set(), None)
    _, (wanted,) = message([group], set(), "replay")
    assert wanted.channel == "replay"


async def each(groups: Sequence[StepGroup]) -> AsyncIterator[StepGroup]:
    for group in groups:
        yield group


async def test_an_import_is_counted_by_what_became_of_its_steps() -> None:
    pool = LocalPool()
    await pool.register_trajectory(Registration("known", "q"))
    await pool.abort_trajectory("known", "q")
    groups = [stored(turns("a", 2), turns("b")), stored(turns("known", 1, "q"))]
    report = await import_groups(pool, each(groups), None, TransferProgress())
    assert report.verdicts == {SubmitVerdict.ACCEPTED: 3, SubmitVerdict.LATE: 1}
    assert report.text() == "3 accepted, 1 late"
    again = await import_groups(pool, each(groups), None, TransferProgress())
    assert again.verdicts == {SubmitVerdict.DUPLICATE: 3, SubmitVerdict.LATE: 1}
    assert pool.rules.stats().channels["train"].ready_groups == 1


async def test_a_trajectory_that_does_not_add_up_is_not_sent() -> None:
    pool = LocalPool()
    bad = [*turns("a"), make_step("a", "p", step_index=1, response_ids=[])]
    report = await import_groups(pool, each([stored(bad, turns("b")), stored(bad)]), None, TransferProgress())
    assert (report.verdicts, report.unsound) == ({SubmitVerdict.ACCEPTED: 1}, Counter(no_response_ids=2))
    assert report.text() == "1 accepted, 2 trajectories unsound (no_response_ids)"


async def test_what_the_pool_has_no_room_for_is_told() -> None:
    pool = LocalPool(max_queue_size=1)
    groups = each([stored(turns(uid, 2, uid)) for uid in "abc"])
    report = await import_groups(pool, groups, None, TransferProgress(), message_bytes=1)
    assert report.dropped == {"evicted": 4}


async def test_nothing_to_import_is_said() -> None:
    pool = LocalPool()
    assert (await import_groups(pool, each([]), None, TransferProgress())).text() == "there was nothing to import"
