from typing import Any

import pytest

from rig.builders import EasyPool as Pool
from rig.builders import make_step
from stepwell.errors import BadRequest, Conflict, UnknownTrajectory
from stepwell.pool.api.leasing import BatchRequest, Settlement
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.steps.step import Step, ids_array


def pool(**limits: Any) -> Pool:
    return Pool(Limits(**limits))


def rollout(
    pool: Pool, uid: str, prompt: str, *, size: int = 1, channel: str = "train", reward: float | None = 1.0
) -> None:
    """One whole trajectory of one step."""
    pool.register(Registration(uid, prompt, channel, size))
    assert pool.submit([make_step(uid, prompt, uid=f"{uid}-0")]) == [SubmitVerdict.ACCEPTED]
    assert pool.complete(uid, prompt, reward) is EndResult.COMPLETED


def take(pool: Pool, groups: int = 1, channel: str = "train") -> list[list[Step]]:
    taken = pool.take(groups, channel)
    assert taken is not None
    return taken


def uids(groups: list[list[Step]]) -> list[list[str]]:
    return [[step.trajectory_uid for step in group] for group in groups]


def test_a_group_comes_out_once_all_its_trajectories_are_complete() -> None:
    p = pool()
    for i in range(3):
        rollout(p, f"t{i}", "p", size=4)
        assert p.take(1, "train") is None
    rollout(p, "t3", "p", size=4)
    assert uids(take(p)) == [["t0", "t1", "t2", "t3"]]
    assert p.take(1, "train") is None


def test_an_unfinished_group_does_not_block_a_finished_younger_one() -> None:
    p = pool()
    p.register(Registration("slow", "old", group_size=2))
    rollout(p, "quick", "young")
    assert uids(take(p)) == [["quick"]]


def test_the_oldest_ready_group_goes_first_whenever_it_became_ready() -> None:
    p = pool()
    for uid in ("a", "b", "c"):
        p.register(Registration(uid, f"prompt-{uid}"))
        p.submit([make_step(uid, f"prompt-{uid}")])
    for uid in ("c", "a", "b"):
        p.complete(uid, f"prompt-{uid}")
    assert uids(take(p, 3)) == [["a"], ["b"], ["c"]]


def test_fewer_ready_groups_than_asked_for_stay_where_they_are() -> None:
    p = pool()
    rollout(p, "a", "p1")
    assert p.take(2, "train") is None
    rollout(p, "b", "p2")
    assert uids(take(p, 2)) == [["a"], ["b"]]


def test_the_same_prompt_in_a_later_epoch_is_a_new_group() -> None:
    p = pool()
    for i in range(4):
        rollout(p, f"t{i}", "p", size=2)
    assert uids(take(p, 2)) == [["t0", "t1"], ["t2", "t3"]]


def test_validation_data_never_leaves_its_channel() -> None:
    p = pool()
    rollout(p, "v", "p", channel="validation")
    rollout(p, "t", "p", channel="train")
    assert uids(take(p)) == [["t"]]
    assert p.take(1, "train") is None
    assert uids(take(p, channel="validation")) == [["v"]]


def test_a_full_queue_drops_its_oldest_group_and_counts_it() -> None:
    p = pool(max_queue_size=2)
    for uid in ("a", "b", "c"):
        rollout(p, uid, f"prompt-{uid}")
    assert uids(take(p, 2)) == [["b"], ["c"]]
    dropped = p.stats().channels["train"].dropped["evicted"]
    assert (dropped.steps, dropped.tokens) == (1, 4)


def test_a_full_training_queue_drops_no_validation_data() -> None:
    p = pool(max_queue_size=1)
    rollout(p, "v", "p", channel="validation")
    rollout(p, "a", "p1")
    rollout(p, "b", "p2")
    assert uids(take(p, channel="validation")) == [["v"]]


def test_a_late_step_does_not_revive_an_evicted_group() -> None:
    p = pool(max_queue_size=1)
    p.register(Registration("old", "p1"))
    rollout(p, "new", "p2")
    assert p.submit([make_step("old", "p1")]) == [SubmitVerdict.LATE]
    assert p.submit([make_step("old", "p1")], channel="train") == [SubmitVerdict.LATE]
    assert p.complete("old", "p1") is EndResult.LATE
    assert uids(take(p)) == [["new"]]
    assert p.stats().channels["train"].groups == 0
    assert p.stats().refused == {"late": 2}
    with pytest.raises(Conflict, match="already shipped or dropped"):
        p.register(Registration("old", "p1"))


def test_a_step_sent_twice_is_kept_once() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    assert p.submit([make_step(uid="x"), make_step(uid="x")]) == [SubmitVerdict.ACCEPTED, SubmitVerdict.DUPLICATE]
    assert p.submit([make_step(uid="x")]) == [SubmitVerdict.DUPLICATE]
    p.complete("t", "p")
    assert len(take(p)[0]) == 1


def test_steps_are_indexed_in_the_order_their_calls_began_however_they_arrive() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    p.submit([make_step(uid=str(at), started_at=at, prompt_ids=[int(at)]) for at in (1.0, 3.0, 2.0)])
    p.complete("t", "p", 0.5)
    (group,) = take(p)
    assert [(s.step_index, s.started_at, s.is_last, s.reward) for s in group] == [
        (0, 1.0, False, None),
        (1, 2.0, False, None),
        (2, 3.0, True, 0.5),
    ]


def test_a_white_box_step_marked_last_completes_its_trajectory() -> None:
    p = pool()
    steps = [make_step(step_index=1, is_last=True, reward=0.0), make_step(step_index=0)]
    assert p.submit(steps, channel="train") == [SubmitVerdict.ACCEPTED] * 2
    (group,) = take(p)
    assert [(s.step_index, s.is_last, s.reward) for s in group] == [(0, False, None), (1, True, 0.0)]


def test_indexed_and_unindexed_steps_do_not_mix() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    assert p.submit([make_step(uid="a"), make_step(step_index=1)]) == [
        SubmitVerdict.ACCEPTED,
        SubmitVerdict.MIXED_INDEXES,
    ]


def test_steps_of_an_unregistered_trajectory_are_refused_not_guessed_into_training() -> None:
    p = pool()
    assert p.submit([make_step("t", "p")]) == [SubmitVerdict.UNKNOWN]
    p.register(Registration("t", "p"))
    assert p.submit([make_step("t", "another")]) == [SubmitVerdict.UNKNOWN]
    assert p.stats().refused == {"unknown": 2}


@pytest.mark.parametrize("end", [Pool.complete, Pool.abort])
def test_ending_an_unknown_trajectory_is_an_error(end: object) -> None:
    assert callable(end)
    with pytest.raises(UnknownTrajectory, match="no trajectory t of prompt_uid p"):
        end(pool(), "t", "p")


def test_an_unscored_trajectory_stays_unscored_beside_scored_ones() -> None:
    p = pool()
    rollout(p, "scored", "p", size=2, reward=1.0)
    rollout(p, "unscored", "p", size=2, reward=None)
    assert [step.reward for step in take(p)[0]] == [1.0, None]


def test_an_aborted_trajectory_frees_its_place_in_the_group() -> None:
    p = pool()
    rollout(p, "a", "p", size=2)
    p.register(Registration("failed", "p", group_size=2))
    p.submit([make_step("failed", "p")])
    assert p.abort("failed", "p") is EndResult.ABORTED
    assert p.take(1, "train") is None
    rollout(p, "b", "p", size=2)
    assert uids(take(p)) == [["a", "b"]]
    assert p.stats().channels["train"].dropped["aborted"].steps == 1


def test_an_abort_takes_back_a_completed_trajectory() -> None:
    p = pool(batch_size=4, max_staleness=0)
    rollout(p, "a", "p", size=2)
    rollout(p, "b", "p", size=2)
    assert p.abort("b", "p") is EndResult.ABORTED
    assert p.take(1, "train") is None
    assert p.pacing("train").may_start == 3
    assert p.stats().channels["train"].dropped["aborted"].steps == 1
    assert p.complete("b", "p", 1.0) is EndResult.LATE
    rollout(p, "c", "p", size=2)
    assert uids(take(p)) == [["a", "c"]]


def test_a_group_taken_back_whole_is_gone() -> None:
    p = pool(batch_size=4, max_staleness=0)
    for uid in ("a", "b", "c"):
        rollout(p, uid, "p", size=4)
    assert {p.abort(uid, "p") for uid in ("a", "b", "c")} == {EndResult.ABORTED}
    stats = p.stats().channels["train"]
    assert (stats.groups, stats.trajectories, stats.nbytes, p.pacing("train").may_start) == (0, 0, 0, 4)


def test_an_abort_of_what_a_trainer_has_or_had_comes_too_late() -> None:
    p = pool()
    rollout(p, "t", "p")
    leased = p.lease(1)
    assert leased is not None
    assert p.abort("t", "p") is EndResult.LATE
    assert p.leasing.ack(leased[0]) is Settlement.DONE
    assert p.abort("t", "p") is EndResult.LATE
    assert p.stats().channels["train"].shipped.steps == 1


def test_an_aborted_lone_trajectory_leaves_no_group_behind() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    p.abort("t", "p")
    assert p.stats().channels["train"].groups == 0


@pytest.mark.parametrize(("reward", "end"), [(None, EndResult.EMPTY), (1.0, EndResult.COMPLETED)])
def test_a_trajectory_without_a_sound_step_is_never_trained(reward: float | None, end: EndResult) -> None:
    p = pool()
    p.register(Registration("t", "p"))
    assert p.submit([make_step(uid="x", quarantine="bad_logprob: NaN")]) == [SubmitVerdict.QUARANTINED]
    assert p.complete("t", "p", reward) is end
    assert p.take(1, "train") is None


def test_a_quarantined_step_is_not_trained_but_keeps_its_place_and_is_counted() -> None:
    p = pool(quarantine_kept=1)
    p.register(Registration("t", "p"))
    p.submit([make_step(uid=str(i), started_at=i, quarantine="bad_logprob: NaN" if i == 1 else None) for i in range(3)])
    p.complete("t", "p")
    assert [step.step_index for step in take(p)[0]] == [0, 2]
    assert p.stats().quarantined == {"bad_logprob": 1}
    assert [step.quarantine for step in p.state.quarantine] == ["bad_logprob: NaN"]


def test_a_step_still_on_its_way_at_completion_is_taken_until_the_group_ships() -> None:
    p = pool()
    rollout(p, "t", "p")
    assert p.submit([make_step("t", "p", uid="straggler")]) == [SubmitVerdict.ACCEPTED]
    (group,) = take(p)
    assert [(step.uid, step.is_last, step.reward) for step in group] == [("t-0", False, None), ("straggler", True, 1.0)]
    assert p.submit([make_step("t", "p", uid="too late")]) == [SubmitVerdict.LATE]


def test_registering_again_adds_metadata_and_may_change_the_channel_before_the_first_step() -> None:
    p = pool()
    p.register(Registration("t", "p", metadata={"a": 1, "b": 1}))
    p.register(Registration("t", "p", "validation", metadata={"b": 2}))
    assert p.stats().channels["train"].groups == 0
    p.submit([make_step(uid="x", metadata={"c": 3})])
    p.complete("t", "p")
    assert take(p, channel="validation")[0][0].metadata == {"a": 1, "b": 2, "c": 3}


def test_registrations_that_contradict_what_is_known_are_refused_and_change_nothing() -> None:
    p = pool()
    p.register(Registration("t", "p", group_size=2))
    p.register(Registration("v", "p", "validation", group_size=3))
    for wanted, reason in [
        (Registration("t", "other"), "belongs to prompt_uid 'p'"),
        (Registration("t", "p", group_size=3), "group of 2, not 3"),
        (Registration("t", "p", "validation"), "one of 3 trajectories, not 2"),
        (Registration("u", "p", group_size=3), "one of 2 trajectories, not 3"),
    ]:
        with pytest.raises(Conflict, match=reason):
            p.register(wanted)
    p.submit([make_step("t", "p")])
    with pytest.raises(Conflict, match="already has steps in channel 'train'"):
        p.register(Registration("t", "p", "elsewhere"))
    assert p.channel_if_open("t", "p")
    assert p.stats().channels["train"].trajectories == 1


def test_channels_are_bounded() -> None:
    p = pool(max_channels=1)
    p.register(Registration("t", "p"))
    with pytest.raises(BadRequest, match="one too many"):
        p.register(Registration("u", "p", "another"))


def test_a_consumer_is_told_what_it_waits_for() -> None:
    p = pool()
    assert "never had any (channels: none)" in p.waiting_for(BatchRequest(count=1, channel="train"))
    rollout(p, "a", "p", size=4)
    p.register(Registration("b", "p", group_size=4))
    assert p.waiting_for(BatchRequest(count=2, channel="train")) == (
        "2 ready groups in channel 'train'; 0 ready of 1 groups held; the oldest unfinished group, 'p', "
        "has 1 of 4 trajectories complete and 2 started"
    )


def test_the_steps_of_a_conversation_are_found_by_its_digest() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    for uid, replied, ids in (("a", "x", [1, 2]), ("b", "y", [1, 2, 3, 4]), ("c", "x", [1, 9])):
        step = make_step("t", "p", uid=uid, prompt_ids=ids_array(ids), lineage={"replied": replied})
        assert p.submit([step]) == [SubmitVerdict.ACCEPTED]
    found = p.ingest.turns("t", "p", "x")
    assert [turn.uid for turn in found] == ["a", "c"]
    assert [turn.tokens[:2].tolist() for turn in found] == [[1, 2], [1, 9]]
    assert [turn.lineage for turn in found] == [{"replied": "x"}] * 2
    assert not p.ingest.turns("t", "p", "z")
    assert not p.ingest.turns("t", "another", "x")
    p.complete("t", "p", 1.0)
    assert not p.ingest.turns("t", "p", "x")


def test_what_steps_hold_for_a_producer_is_found_by_its_name_while_the_trajectory_is_open() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    for uid, extras in (("a", {"kept": {"n": 1}, "other": 2}), ("b", {"other": 3}), ("c", {"kept": {"n": 4}})):
        assert p.submit([make_step("t", "p", uid=uid, extras=extras)]) == [SubmitVerdict.ACCEPTED]
    assert p.ingest.step_extras("t", "p", "kept") == {"a": {"n": 1}, "c": {"n": 4}}
    assert p.ingest.step_extras("t", "another", "kept") == {}
    p.complete("t", "p", 1.0)
    assert p.ingest.step_extras("t", "p", "kept") == {}
