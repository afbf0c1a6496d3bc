"""Scored groups that come whole, batches filled to an exact number of trajectories, and what is dropped at a clear."""

from dataclasses import replace

import pytest
from stepwell.steps.trainable import StepFilter, make_step_filter

from rig.builders import EVERYTHING, EasyPool, in_groups, make_group, make_step, same_step
from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.leasing import ExactFill, LeasedGroups, Settlement, merge_leased_groups
from stepwell.pool.api.plan import Limits, Overflow
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.rules.exact_batch import choose_groups
from stepwell.steps.columns import cut, pack, stack, unpack
from stepwell.steps.step import Exactness, Step


def wanted(trajectories: int, channel: str = "train") -> ExactFill:
    return ExactFill(trajectories=trajectories, channel=channel, shares={}, lease=10.0, step_filter=EVERYTHING)


def prompts(filled: tuple[str, LeasedGroups] | None) -> list[str]:
    assert filled is not None
    return [group[0].prompt_uid for group in in_groups(filled[1])]


def trajectories(filled: tuple[str, LeasedGroups] | None) -> int:
    assert filled is not None
    return len({(step.prompt_uid, step.trajectory_uid) for group in in_groups(filled[1]) for step in group})


def pool_of(*groups: tuple[str, int, str], **limits: object) -> EasyPool:
    pool = EasyPool(Limits(**limits))  # type: ignore[arg-type]
    for prompt, size, source in groups:
        assert pool.send_group(prompt, size, source) == [SubmitVerdict.ACCEPTED] * size
    return pool


# -- groups that come whole --------------------------------------------------------------------------------------------


def test_a_group_is_ready_as_soon_as_it_came() -> None:
    pool = pool_of(("p", 3, "maths"))
    assert pool.stats().channels["train"].ready_groups == 1
    assert pool.stats().channels["train"].ready_by_source == {"maths": 1}
    groups = pool.take(1)
    assert groups is not None
    assert [step.trajectory_uid for step in groups[0]] == ["p-0", "p-1", "p-2"]


def test_a_group_that_is_sent_again_is_taken_once_wherever_it_is_by_then() -> None:
    pool = pool_of(("p", 2, "maths"))
    assert pool.send_group("p", 2, "maths") == [SubmitVerdict.DUPLICATE] * 2
    leased = pool.fill(2)
    assert pool.send_group("p", 2, "maths") == [SubmitVerdict.DUPLICATE] * 2
    assert leased is not None
    pool.leasing.ack(leased[0])
    assert pool.send_group("p", 2, "maths") == [SubmitVerdict.LATE] * 2
    assert pool.fill(2) is None
    assert pool.stats().submitted == 8


def test_a_full_channel_refuses_the_steps_of_new_groups_and_of_no_others() -> None:
    pool = pool_of(("p", 1, ""), max_queue_size=2, overflow=Overflow.REFUSE)
    sent = [make_group(prompt, 2) for prompt in ("q", "r")]
    steps = [step for steps, _ in sent for step in steps]
    registrations = [wanted for _, registrations in sent for wanted in registrations]
    verdicts = pool.ingest.submit_groups(pack(steps), registrations)
    assert verdicts == [SubmitVerdict.ACCEPTED] * 2 + [SubmitVerdict.FULL] * 2
    assert pool.stats().refused == {"full": 2}
    pool.take(1)
    assert (
        pool.ingest.submit_groups(pack(steps), registrations)
        == [SubmitVerdict.DUPLICATE] * 2 + [SubmitVerdict.ACCEPTED] * 2
    )


def test_a_registration_that_contradicts_another_spoils_nothing_else() -> None:
    pool = pool_of(("p", 1, ""), max_channels=1)
    steps, registrations = make_group("q", 1)
    other_prompt = make_step("p-0", "elsewhere")
    other_channel = make_step("x", "x")
    wrong = [Registration("p-0", "elsewhere", "train", 1), Registration("x", "x", "one too many", 1)]
    verdicts = pool.ingest.submit_groups(pack([other_prompt, other_channel, *steps]), [*wrong, *registrations])
    assert verdicts == [SubmitVerdict.UNKNOWN, SubmitVerdict.UNKNOWN, SubmitVerdict.ACCEPTED]


def test_a_group_keeps_the_source_it_was_opened_with() -> None:
    pool = EasyPool(Limits(group_size=2))
    pool.register(Registration("a", "p", source="first"))
    pool.register(Registration("b", "p", source="second"))
    pool.register(Registration("b", "p", "validation"))
    pool.register(Registration("b", "p", "train"))
    pool.submit([make_step(uid, "p", step_index=0, is_last=True) for uid in ("a", "b")])
    assert pool.ready_groups("train").groups == {"first": {2: 1}}


# -- filling -----------------------------------------------------------------------------------------------------------


def test_a_batch_has_exactly_as_many_trajectories_as_were_asked_for_from_the_oldest_groups() -> None:
    pool = pool_of(("a", 3, ""), ("b", 2, ""), ("c", 2, ""), ("d", 2, ""), ("e", 1, ""))
    filled = pool.fill(4)
    assert prompts(filled) == ["a", "e"]
    assert trajectories(filled) == 4
    assert prompts(pool.fill(4)) == ["b", "c"]
    assert pool.fill(4) is None
    assert prompts(pool.fill(2)) == ["d"]


def test_the_sources_stand_beside_the_groups() -> None:
    pool = pool_of(("a", 2, "maths"), ("b", 2, "games"))
    pool.rollout("t", "agent")
    filled = pool.fill(5)
    assert filled is not None
    assert filled[1].sources == ["maths", "games", ""]
    assert filled[1].group_sizes == [2, 2, 1]


def test_what_was_filled_is_leased_comes_back_and_goes_for_good_as_any_batch() -> None:
    pool = pool_of(("a", 2, ""), ("b", 2, ""))
    first = pool.fill(2, seconds=10)
    assert first is not None
    assert pool.fill(4) is None
    pool.advance(11)
    again = pool.fill(4)
    assert again is not None
    assert prompts(again) == ["a", "b"]
    assert again[1].attempts == [1, 0]
    assert pool.leasing.ack(first[0]) is Settlement.EXPIRED
    assert pool.leasing.ack(again[0]) is Settlement.DONE
    assert pool.stats().channels["train"].shipped.steps == 4


def test_what_no_one_saw_goes_back_without_counting_as_an_attempt() -> None:
    pool = pool_of(("a", 2, ""))
    first = pool.fill(2)
    assert first is not None
    pool.leasing.nack(first[0], attempted=False)
    again = pool.fill(2)
    assert again is not None
    assert again[1].attempts == [0]


def test_asking_again_under_the_same_lease_gives_the_same_again() -> None:
    pool = pool_of(("a", 2, ""), ("b", 2, ""))
    chosen = choose_groups(pool.leasing.offers(wanted(2)), 2, {})
    assert chosen is not None
    one, two = (pool.leasing.take_offers(wanted(2), chosen, "lease", 10.0) for _ in range(2))
    assert one is not None
    assert two is not None
    assert one.columns.uids == two.columns.uids == ["a-0-0", "a-1-0"]


def test_nothing_is_taken_if_a_part_of_it_is_gone() -> None:
    pool = pool_of(("a", 2, ""), ("b", 2, ""))
    offers = pool.leasing.offers(wanted(4))
    pool.take(1)
    assert pool.leasing.take_offers(wanted(4), offers, "lease", 10.0) is None
    assert prompts(pool.fill(2)) == ["b"]
    assert pool.leasing.take_offers(wanted(4, "elsewhere"), offers, "lease", 10.0) is None


def test_what_is_offered_does_not_grow_with_the_queue() -> None:
    pool = pool_of(*((f"p{n}", 4, "maths") for n in range(200)), *((f"q{n}", 8, "games") for n in range(100)))
    assert len(pool.leasing.offers(wanted(64))) == 16 + 8
    assert pool.leasing.offers(wanted(3)) == []
    assert pool.leasing.offers(wanted(64, "elsewhere")) == []


def test_stale_groups_are_dropped_when_they_are_come_upon() -> None:
    pool = pool_of(("old", 2, ""), max_staleness=1)
    pool.policy_version = 2
    pool.send_group("new", 2, policy_version=2)
    assert prompts(pool.fill(2)) == ["new"]
    assert pool.stats().channels["train"].dropped["stale"].steps == 2


def test_a_group_of_which_a_part_is_left_out_counts_with_the_rest() -> None:
    pool = EasyPool(Limits())
    for n in range(8):
        steps, registrations = make_group(f"p{n}", 4)
        again = [make_step(s.trajectory_uid, s.prompt_uid, exactness=Exactness.RETOKENIZED) for s in steps[2:]]
        pool.ingest.submit_groups(pack([*steps[:2], *again]), registrations)
        for step in again:
            pool.complete(step.trajectory_uid, step.prompt_uid, 1.0)
    step_filter = StepFilter(Exactness.SUBMITTED, untrainable=False)
    filled = pool.fill(8, step_filter=step_filter)
    assert trajectories(filled) == 8
    assert prompts(filled) == ["p0", "p1", "p2", "p3"]
    assert trajectories(pool.fill(8)) == 8


def test_a_channel_consumed_by_steps_cannot_be_filled_from() -> None:
    pool = pool_of(("a", 1, ""))
    pool.take(1, unit="steps")
    with pytest.raises(Conflict, match="consumed by steps, not by groups"):
        pool.fill(1)


def test_an_unknown_grade_is_told() -> None:
    with pytest.raises(BadRequest, match="perfect"):
        make_step_filter("perfect", True)


# -- ready groups, and clearing ----------------------------------------------------------------------------------------


def test_ready_groups_are_counted_by_source_and_size() -> None:
    pool = pool_of(("a", 2, "maths"), ("b", 2, "maths"), ("c", 4, "maths"), ("d", 1, ""))
    pool.register(Registration("open", "e"))
    ready = pool.ready_groups("train")
    assert ready.groups == {"maths": {2: 2, 4: 1}, "": {1: 1}}
    assert (ready.total_groups, sum(map(ready.trajectories_of, ready.groups)), ready.largest) == (4, 9, 4)
    assert (sum(ready.groups.get("maths", {}).values()), ready.trajectories_of("maths")) == (3, 8)
    assert (sum(ready.groups.get("silent", {}).values()), ready.trajectories_of("silent")) == (0, 0)
    pool.fill(2)
    assert pool.ready_groups("train").groups == {"maths": {2: 1, 4: 1}, "": {1: 1}}
    assert pool.ready_groups("elsewhere").largest == 0


def test_a_clear_drops_all_but_what_is_under_lease_and_counts_it() -> None:
    pool = pool_of(("a", 2, ""), ("b", 2, ""), ("c", 2, ""))
    pool.register(Registration("open", "d"))
    pool.send_group("v", 1, channel="validation")
    leased = pool.fill(2)
    assert leased is not None
    assert pool.clear("train") == 3
    assert pool.clear("train") == pool.clear("elsewhere") == 0
    assert pool.send_group("b", 2) == [SubmitVerdict.LATE] * 2
    stats = pool.stats().channels
    assert (stats["train"].dropped["cleared"].steps, stats["train"].held.steps) == (4, 2)
    assert stats["validation"].ready_groups == 1
    pool.leasing.nack(leased[0])
    assert prompts(pool.fill(2)) == ["a"]


# -- parts of several shards -------------------------------------------------------------------------------------------


def test_parts_of_several_shards_become_one_oldest_first() -> None:
    one, two = pool_of(("a", 2, "x")), pool_of(("b", 1, "y"))
    one.advance(5.0)
    two.advance(3.0)
    one.send_group("c", 1, "z")
    two.send_group("d", 2, "")
    parts = [
        replace(filled[1], leases=((name, filled[0]),))
        for name, filled in (("one", one.fill(3)), ("two", two.fill(3)))
        if filled
    ]
    merged = merge_leased_groups(parts)
    assert merged.columns.uids == ["a-0-0", "a-1-0", "b-0-0", "d-0-0", "d-1-0", "c-0-0"]
    assert merged.group_sizes == [2, 1, 2, 1]
    assert merged.sources == ["x", "y", "", "z"]
    assert merged.opened_at == [0.0, 0.0, 3.0, 5.0]
    assert merged.leases == (("one", "lease-1"), ("two", "lease-1"))
    assert merge_leased_groups(parts[:1]) is parts[0]


def test_columns_can_be_cut_and_stacked_again() -> None:
    steps = [make_step(f"t{n}", prompt_ids=range(n + 1), response_ids=range(3 - n)) for n in range(3)]
    pieces = cut(pack(steps), [1, 0, 2])
    assert [len(piece) for piece in pieces] == [1, 0, 2]

    def same(found: list[Step]) -> bool:
        return all(same_step(a, b) for a, b in zip(found, steps, strict=True))

    assert same([step for piece in pieces for step in unpack(piece, copy=False)])
    assert same(unpack(stack(pieces), copy=False))
