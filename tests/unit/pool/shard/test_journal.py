"""What survives in a journal, wherever it is."""

import pytest

from rig.builders import make_step
from stepwell.errors import Conflict
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.scoring import Score
from stepwell.steps.step import Exactness
from tests.unit.pool.shard.journals import Place, kill, mixed_rollout, open_pool, rows, save


def test_what_was_committed_survives_and_what_was_not_does_not(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("kept", "p", 0.5, metadata={"a": [1]}, extras={"b": "c"})
    save(pool, journal)
    pool.rollout("lost", "q")
    kill(journal)
    pool, _, restored = open_pool(place)
    assert (restored.groups, restored.steps, restored.damaged) == (1, 1, False)
    taken = pool.take(1)
    assert taken is not None
    (step,) = taken[0]
    assert (step.trajectory_uid, step.reward, step.metadata, step.extras) == ("kept", 0.5, {"a": [1]}, {"b": "c"})
    assert pool.take(1) is None


def test_it_holds_only_what_the_pool_holds(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    for n in range(10):
        pool.rollout(f"t{n}", f"p{n}")
    pool.take(10)
    pool.register(Registration("open", "p"))
    journal.remove_retired()
    save(pool, journal)
    assert rows(journal) == {"groups": 1, "trajectories": 1, "steps": 0, "leases": 0}


def test_a_long_session_is_journaled_as_what_each_turn_adds(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.register(Registration("t", "p"))
    for turn in range(50):
        pool.submit([make_step(uid=str(turn), started_at=turn, prompt_ids=range(100 * turn + 1), response_ids=[7])])
    save(pool, journal)
    ((added,),) = journal.store.rows("SELECT sum(length(added)) FROM steps")
    assert added < 3 * 4 * 5000
    kill(journal)
    pool, _, _ = open_pool(place)
    pool.complete("t", "p")
    taken = pool.take(1)
    assert taken is not None
    assert [step.prompt_ids.tolist() for step in taken[0]] == [list(range(100 * turn + 1)) for turn in range(50)]


def test_a_batch_under_lease_at_the_kill_can_still_be_acknowledged(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p")
    leased = pool.lease(1, seconds=100)
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place)
    pool.leases = 1
    assert pool.lease(1) is None
    assert pool.leasing.ack(leased[0]) == "done"
    pool.advance(1000)
    assert pool.lease(1) is None


def test_how_a_lease_ended_is_known_after_a_restart(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("a", "p")
    pool.rollout("b", "q")
    expired, acked = pool.lease(1, seconds=10), pool.lease(1, seconds=100)
    assert expired is not None
    assert acked is not None
    pool.leasing.ack(acked[0])
    pool.advance(50)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place)
    assert pool.leasing.ack(expired[0]) == "expired"
    assert pool.leasing.ack(acked[0]) == "done"


def test_what_a_channel_is_consumed_by_is_known_after_a_restart(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="a")])
    pool.take(1, unit=Unit.STEPS)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place)
    pool.complete("t", "p")
    assert pool.stats().channels["train"].groups == 0, "all its steps were taken, so it is done"
    with pytest.raises(Conflict, match="consumed by steps, not by groups"):
        pool.take(1)


def test_marks_and_grades_survive(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    mixed_rollout(pool)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place)
    taken = pool.take(1, untrainable=True, min_exactness=Exactness.RETOKENIZED)
    assert taken is not None
    assert [(step.uid, step.untrainable, step.exactness.value) for step in taken[0]] == [
        ("plain", None, "submitted"),
        ("greedy", "greedy: temperature is 0", "submitted"),
        ("again", None, "retokenized"),
    ]


def test_what_a_lease_let_through_is_known_after_a_restart_and_so_is_what_was_left_out(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    mixed_rollout(pool)
    leased = pool.lease(1, seconds=100, min_exactness=Exactness.RETOKENIZED)
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(place)
    pool.leasing.ack(leased[0])
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place)
    stats = pool.stats().channels["train"]
    assert (stats.shipped.steps, stats.held.steps) == (2, 0)
    assert {kind: tally.steps for kind, tally in stats.left_out.items()} == {"greedy": 1}


def test_where_groups_come_from_survives_and_so_do_the_shelves(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    for prompt, size, source in (("a", 2, "maths"), ("b", 3, "games"), ("c", 2, "maths"), ("d", 1, "")):
        assert pool.send_group(prompt, size, source) == ["accepted"] * size
    leased = pool.fill(3, shares={"games": 1.0})
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(place)
    assert pool.ready_groups("train").groups == {"maths": {2: 2}, "": {1: 1}}
    pool.leasing.nack(leased[0])
    filled = pool.fill(8)
    assert filled is not None
    assert filled[1].sources == ["maths", "games", "maths", ""]
    assert filled[1].attempts == [0, 1, 0, 0]


def test_what_was_cleared_stays_cleared(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.send_group("a", 2, "maths")
    pool.clear("train")
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(place)
    assert pool.stats().channels["train"].dropped["cleared"].steps == 2
    assert rows(journal) == {"groups": 0, "trajectories": 0, "steps": 0, "leases": 0}
    assert pool.send_group("a", 2, "maths") == ["late"] * 2


def test_what_was_unscored_at_the_kill_is_offered_again_and_judgements_from_before_it_do_not_count(
    place: Place,
) -> None:
    limits = Limits(require_reward=True)
    pool, journal, _ = open_pool(place, limits)
    for uid in ("scored", "taken", "waiting"):
        pool.rollout(uid, uid, None)
    pool.take_unscored(2)
    assert pool.judge("scored", "scored", Score(0.5, notes="good"))
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place, limits)
    assert pool.stats().scoring.scored == 1
    assert not pool.judge("taken", "taken", 1.0)
    assert [steps[0].trajectory_uid for steps in pool.take_unscored()] == ["taken", "waiting"]
    ((step,),) = pool.take(1) or [[]]
    assert (step.reward, step.metadata["reward"]) == (0.5, {"notes": "good"})


@pytest.mark.parametrize("uid", ["zero\0byte", "back\\slash", "grüße 你好"])
def test_names_with_any_character_survive(place: Place, uid: str) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout(uid, "p")
    pool.rollout("closed" + uid, "q")
    pool.take(1)
    leased = pool.lease(1)
    assert leased is not None
    journal.remove_retired()
    save(pool, journal)
    kill(journal)
    pool, _, restored = open_pool(place)
    assert (restored.steps, restored.damaged) == (1, False)
    assert uid in pool.state.closed
    assert "closed" + uid in pool.state.trajectories


def test_half_of_a_surrogate_pair_in_metadata_is_no_damage(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.register(Registration("t", "p", metadata={"note": "\ud800"}))
    pool.submit([make_step(metadata={"note": "\ud800"})])
    save(pool, journal)
    kill(journal)
    pool, _, restored = open_pool(place)
    assert (restored.steps, restored.damaged) == (1, False)
    assert pool.state.trajectories["t"].metadata == {"note": "\ud800"}


def test_the_lineage_of_steps_survives_a_restart(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.register(Registration("t", "p"))
    pool.submit([make_step("t", "p", uid="a", prompt_made="bridged", lineage={"replied": "x"})])
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place)
    assert [turn.lineage for turn in pool.ingest.turns("t", "p", "x")] == [{"replied": "x"}]
