"""T17: an answer that nobody read, or that was not continued, is kept and counted, and no trainer gets it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from stepwell.steps.trainable import NOT_CONTINUED, UNSEEN

from rig.builders import EasyPool, make_step
from stepwell.errors import BadRequest, UnknownTrajectory
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import CONTINUED, READ, EndResult, Registration
from stepwell.pool.client.batch import batch_of
from stepwell.pool.state.call_operations import RANKS
from stepwell.steps.step import CUT_SHORT, Exactness, Step
from stepwell.trainers.rows import choose_rows
from tests.unit.pool.shard.journals import kill, open_pool, save


def recorded(uid: str, started_at: float, **fields: Any) -> Step:
    trajectory, _, _ = uid.partition("-")
    fields = {"temperature": 1.0, "finish_reason": "stop", **fields}
    return make_step(trajectory, uid=uid, started_at=started_at, exactness=Exactness.ENGINE, **fields)


def opened(*uids: str, size: int = 1) -> EasyPool:
    pool = EasyPool(Limits(group_size=size))
    for uid in uids:
        pool.register(Registration(uid, "p", group_size=size))
    return pool


def mark(pool: EasyPool, reason: str, *uids: str) -> None:
    pool.ingest.mark_unseen("a", "p", uids, reason)


def trained(pool: EasyPool) -> list[str]:
    return [step.uid for group in pool.take(1, untrainable=True) or [] for step in group]


def test_answers_that_an_agent_gave_up_get_nothing_of_the_advantage_of_their_retry() -> None:
    pool = opened("a", "b", size=2)
    given_up: dict[str, Any] = {"finish_reason": CUT_SHORT}
    pool.submit(
        [
            recorded("a-0", 1.0, response_ids=[5] * 500, **given_up),
            recorded("a-1", 2.0, response_ids=[6] * 500, **given_up),
            recorded("a-2", 3.0, response_ids=[7] * 20),
            recorded("b-0", 1.0, response_ids=[8] * 20),
        ]
    )
    pool.complete("a", "p", 1.0)
    pool.complete("b", "p", 0.0)
    leased = pool.lease(1, untrainable=True)
    assert leased is not None
    rows = choose_rows(batch_of(leased[1]), ())
    merged = rows.merged
    tokens = [merged.tokens[slice(*merged.offsets_R[n : n + 2])] for n in range(len(merged))]
    assert [int(row[-1]) for row in tokens] == [7, 8]
    assert rows.trained.sum() == 40
    pool.leasing.ack(leased[0])
    channel = pool.stats().channels["train"]
    assert (channel.left_out[UNSEEN].steps, channel.shipped.steps) == (2, 2)
    assert pool.stats().marked == {UNSEEN: 2}


def test_the_answer_in_which_the_policy_failed_is_trained() -> None:
    """Nothing has replaced it, and "too long" is learned where it happened."""
    pool = opened("a")
    pool.submit([recorded("a-0", 1.0, finish_reason=CUT_SHORT), recorded("a-1", 2.0, finish_reason=CUT_SHORT)])
    assert pool.ingest.complete("a", "p", 0.0, "too_long") is EndResult.COMPLETED
    assert trained(pool) == ["a-1"]


def test_a_submitted_step_is_what_its_sender_says() -> None:
    pool = opened("a")
    pool.submit([make_step("a", uid="a-0", finish_reason=CUT_SHORT)])
    pool.complete("a", "p", 1.0)
    assert trained(pool) == ["a-0"]


@pytest.mark.parametrize("marks", list(itertools.permutations(RANKS, 2)))
@pytest.mark.parametrize("arrives_after", [0, 1, 2])
def test_of_two_marks_the_stronger_one_counts_in_any_order(marks: tuple[str, str], arrives_after: int) -> None:
    pool = opened("a")
    for n in range(3):
        if n == arrives_after:
            pool.submit([recorded("a-0", 1.0)])
        if n < 2:
            mark(pool, marks[n], "a-0")
    pool.complete("a", "p", 1.0)
    is_trained = max(marks, key=RANKS.index) in (READ, CONTINUED)
    assert trained(pool) == (["a-0"] if is_trained else [])


def test_a_mark_leaves_other_reasons_as_they_are() -> None:
    pool = opened("a")
    pool.submit([recorded("a-0", 1.0, untrainable="greedy: temperature is 0")])
    mark(pool, UNSEEN, "a-0")
    mark(pool, READ, "a-0")
    pool.complete("a", "p", 1.0)
    assert pool.take(1) is None
    assert pool.stats().channels["train"].left_out.keys() == {"greedy"}


def test_no_mark_makes_data_trainable_whose_person_did_not_agree() -> None:
    pool = EasyPool(Limits(group_size=1))
    pool.register(Registration("a", "p", metadata={"consent": {"train": False}}))
    pool.submit([recorded("a-0", 1.0)])
    before = pool.state.trajectories["a"].steps["a-0"].untrainable
    mark(pool, UNSEEN, "a-0")
    mark(pool, READ, "a-0")
    assert pool.state.trajectories["a"].steps["a-0"].untrainable == before


def test_a_mark_for_what_a_trainer_has_or_had_changes_nothing_and_is_counted() -> None:
    pool = opened("a")
    pool.submit([recorded("a-0", 1.0)])
    pool.complete("a", "p", 1.0)
    leased = pool.lease(1)
    assert leased is not None
    mark(pool, UNSEEN, "a-0")
    pool.leasing.ack(leased[0])
    mark(pool, UNSEEN, "a-0", "a-1")
    assert pool.stats().channels["train"].shipped.steps == 1
    assert pool.stats().marked == {"late": 3}


def test_a_mark_of_an_unknown_name_or_trajectory_is_refused() -> None:
    pool = opened("a")
    with pytest.raises(BadRequest, match="no mark of a step; there are unseen, read, not_continued, continued"):
        mark(pool, "skipped", "a-0")
    with pytest.raises(UnknownTrajectory):
        pool.ingest.mark_unseen("other", "p", ["a-0"], UNSEEN)


def test_marks_survive_a_restart_whether_their_step_came_before_or_after_them(tmp_path: Path) -> None:
    pool, journal, _ = open_pool(tmp_path / "pool.sqlite")
    pool.register(Registration("a", "p", group_size=1))
    pool.submit([recorded("a-0", 1.0, untrainable="greedy: test")])
    mark(pool, UNSEEN, "a-0", "a-1", "a-3")
    pool.submit([recorded("a-1", 2.0), recorded("a-2", 3.0)])
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(tmp_path / "pool.sqlite")
    mark(pool, READ, "a-0", "a-1")
    pool.submit([recorded("a-3", 4.0)])
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(tmp_path / "pool.sqlite")
    steps = pool.state.trajectories["a"].steps.values()
    assert [step.untrainable and step.untrainable.partition(":")[0] for step in steps] == [
        *("greedy", None, None, UNSEEN)
    ]
    assert pool.stats().marked == {UNSEEN: 3, READ: 2}
    journal.close()


def test_of_the_choices_of_a_call_a_turn_names_the_others() -> None:
    pool = opened("a")
    choices = [recorded(f"a-{n}", 1.0, lineage={"asked": "q", "replied": f"r{n}"}) for n in range(3)]
    pool.submit([*choices, recorded("a-9", 2.0, lineage={"asked": "q", "replied": "r9"})])
    assert [(turn.uid, turn.others) for turn in pool.ingest.turns("a", "p", "r1")] == [("a-1", ("a-0", "a-2"))]
    assert [turn.others for turn in pool.ingest.turns("a", "p", "r9")] == [()]
    mark(pool, NOT_CONTINUED, "a-0", "a-2")
    mark(pool, CONTINUED, "a-1")
    pool.complete("a", "p", 1.0)
    assert trained(pool) == ["a-1", "a-9"]
    assert pool.stats().channels["train"].left_out[NOT_CONTINUED].steps == 2
