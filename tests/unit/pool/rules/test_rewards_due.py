"""The desk for reward workers: what they are offered, which judgements count, and what becomes of failures."""

from typing import Any

import pytest

from rig.builders import EasyPool, make_step
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits, OnDeadline, OnRewardFailure
from stepwell.pool.api.producing import Registration, RewardGiven
from stepwell.pool.api.scoring import JudgementOutcome, Score
from stepwell.pool.api.stats import merge_stats
from stepwell.pool.slices.curation import Curation, CurationAction

SIDE_CALL = "side_call: a title was asked for"


def pool(**limits: Any) -> EasyPool:
    return EasyPool(Limits(require_reward=True, **limits))


def offered(p: EasyPool, count: int = 100, lease_uid: str = "look", seconds: float = 0.0) -> list[str]:
    """What a worker gets; with no time given it comes back at once."""
    found = [steps[0].trajectory_uid for steps in p.take_unscored(count, lease_uid, seconds=seconds)]
    p.advance(p.state.now)
    return found


def dropped(p: EasyPool) -> dict[str, int]:
    return {cause: tally.steps for cause, tally in p.stats().channels["train"].dropped.items()}


def scored_once_by(p: EasyPool, uid: str, *unscored: str) -> None:
    """A step with a reward of its own, and steps without."""
    p.register(Registration(uid, uid))
    p.submit([make_step(uid, uid, uid=f"{uid}-0", reward=9.0, untrainable=SIDE_CALL)])
    p.submit([make_step(uid, uid, uid=name, started_at=1) for name in unscored])
    p.complete(uid, uid)


def test_what_is_complete_and_unscored_is_offered_oldest_first_whatever_its_channel() -> None:
    p = pool()
    for uid, channel in (("a", "train"), ("b", "validation"), ("c", "train")):
        p.register(Registration(uid, uid, channel))
        p.submit([make_step(uid, uid)])
    p.rollout("scored", "scored", 0.0)
    scored_once_by(p, "step")
    p.register(Registration("open", "open"))
    p.submit([make_step("open", "open")])
    for uid in ("c", "a", "b"):
        p.complete(uid, uid)
    assert offered(p, 2) == ["a", "b"]
    assert offered(p) == ["a", "b", "c"]


def test_a_worker_gets_every_held_step_in_order_with_its_mark_and_what_the_dataset_says() -> None:
    p = pool()
    p.register(Registration("t", "p", metadata={"answer": "7"}))
    p.submit([make_step(uid="2", started_at=2, untrainable=SIDE_CALL), make_step(uid="1", started_at=1)])
    p.submit([make_step(uid="bad", started_at=3, quarantine="bad_logprob: test")])
    p.complete("t", "p")
    (steps,) = p.take_unscored()
    assert [(step.uid, step.step_index, step.untrainable) for step in steps] == [("1", 0, None), ("2", 1, SIDE_CALL)]
    assert steps[0].metadata == {"answer": "7"}
    assert steps[0].reward is None


def test_where_no_reward_is_required_nothing_is_offered_or_kept_for_it() -> None:
    p = EasyPool(Limits())
    p.rollout("t", "p", None)
    assert p.take_unscored() == []
    assert p.state.oldest_unscored(1) == []


def test_a_score_becomes_the_rollouts_reward_with_its_source_revision_and_reasons() -> None:
    p = pool()
    p.rollout("t", "p", None)
    assert p.take(1) is None
    p.take_unscored()
    assert p.judge("t", "p", Score(0.25, parts={"format": 1.0}, notes="nearly"))
    ((step,),) = p.take(1) or [[]]
    assert (step.reward, step.reward_source, step.reward_revision) == (0.25, "judge", 1)
    assert step.metadata["reward"] == {"parts": {"format": 1.0}, "notes": "nearly"}


def test_step_rewards_go_to_their_steps_and_what_they_leave_of_the_value_to_the_last() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    p.submit([make_step(uid=str(n), started_at=n) for n in range(3)])
    p.complete("t", "p")
    p.take_unscored()
    assert p.judge("t", "p", Score(1.0, step_rewards=(0.5, None, None)))
    assert [step.reward for step in (p.take(1) or [[]])[0]] == [0.5, None, 0.5]


@pytest.mark.parametrize("score", [Score(float("nan")), Score(1.0, step_rewards=(1.0, 2.0)), JudgementOutcome.SCORE])
def test_what_is_no_score_for_the_trajectory_counts_as_an_error(score: Score | JudgementOutcome) -> None:
    p = pool()
    p.rollout("t", "p", None)
    p.take_unscored()
    p.judge("t", "p", score)
    assert p.take(1) is None
    assert p.stats().scoring.failed == {"error": 1}


def test_a_judgement_counts_once() -> None:
    p = pool()
    p.rollout("t", "p", None)
    p.take_unscored()
    assert [p.judge("t", "p", 1.0), p.judge("t", "p", 2.0), p.judge("x", "p", 1.0)] == [True, False, False]
    assert (p.take(1) or [[]])[0][0].reward == 1.0
    stats = p.stats().scoring
    assert (stats.scored, stats.late, stats.waiting, stats.under_way) == (1, 2, 0, 0)


def test_what_a_worker_does_not_answer_for_in_time_goes_to_the_next_before_all_that_is_younger() -> None:
    p = pool()
    p.rollout("a", "p", None)
    p.rollout("b", "q", None)
    p.take_unscored(1, "slow", seconds=10)
    assert p.stats().scoring.under_way == 1
    assert offered(p) == ["b"]
    p.advance(10.0)
    assert offered(p, lease_uid="next", seconds=10) == ["a", "b"]
    assert not p.judge("a", "p", 1.0, "slow")
    assert p.judge("a", "p", 2.0, "next")


def test_asking_again_under_the_same_lease_gives_the_same_again() -> None:
    p = pool()
    p.rollout("a", "p", None)
    p.rollout("b", "q", None)
    assert [offered(p, 1, "same", 10), offered(p, 2, "same", 10)] == [["a"], ["a"]]


def test_a_reward_that_is_given_meanwhile_stands() -> None:
    p = pool()
    p.rollout("t", "p", None)
    p.take_unscored()
    p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5, source="human", notes="fine"))
    assert not p.judge("t", "p", 1.0)
    ((step,),) = p.take(1) or [[]]
    assert (step.reward, step.reward_source, step.metadata) == (0.5, "human", {"reward": {"notes": "fine"}})


def test_a_step_that_arrives_meanwhile_makes_the_judgement_void() -> None:
    p = pool()
    p.rollout("t", "p", None)
    p.take_unscored()
    p.submit([make_step(uid="late", started_at=1)])
    assert not p.judge("t", "p", 1.0)
    assert [len(steps) for steps in p.take_unscored(lease_uid="again")] == [2]


def test_a_judgement_of_what_was_dropped_meanwhile_changes_nothing() -> None:
    p = pool(max_queue_size=1)
    p.rollout("old", "p", None)
    p.take_unscored()
    p.rollout("new", "q", None)
    assert not p.judge("old", "p", 1.0)
    assert offered(p) == ["new"]


def fail(p: EasyPool, outcome: JudgementOutcome, attempts: int) -> None:
    """Every attempt at the trajectory `a` ends so."""
    for n in range(attempts):
        p.advance(p.state.now + 60.0)
        p.take_unscored(1, str(n))
        assert p.judge("a", "p", outcome, str(n))


def two(p: EasyPool) -> EasyPool:
    p.rollout("a", "p", None, size=2)
    p.rollout("b", "p", 1.0, size=2)
    return p


@pytest.mark.parametrize("outcome", [JudgementOutcome.ERROR, JudgementOutcome.TIMEOUT])
def test_a_failure_is_tried_again_after_a_rest_and_is_no_reward(outcome: JudgementOutcome) -> None:
    p = two(pool())
    fail(p, outcome, 2)
    assert offered(p) == []
    assert p.stats().scoring.resting == 1
    p.advance(p.state.now + 2.0)
    assert offered(p) == ["a"]
    assert p.take(1) is None
    assert p.stats().scoring.failed == {outcome: 2}


def test_what_cannot_be_scored_leaves_its_group_and_its_place_is_free() -> None:
    p = two(pool())
    fail(p, JudgementOutcome.ERROR, 3)
    assert dropped(p) == {"reward_failed": 1}
    p.rollout("c", "p", 0.5, size=2)
    assert [step.trajectory_uid for step in (p.take(1) or [[]])[0]] == ["b", "c"]


def test_what_cannot_be_scored_can_take_its_group_with_it() -> None:
    p = two(pool(on_reward_failure=OnRewardFailure.DROP_GROUP, reward_attempts=1))
    fail(p, JudgementOutcome.ERROR, 1)
    assert dropped(p) == {"reward_failed": 2}
    assert p.stats().channels["train"].groups == 0


def test_what_cannot_be_scored_can_be_kept_for_someone_else() -> None:
    p = two(pool(on_reward_failure=OnRewardFailure.KEEP, reward_attempts=1))
    fail(p, JudgementOutcome.TIMEOUT, 1)
    p.advance(1e6)
    assert offered(p) == []
    assert p.take(1) is None
    p.ingest.reward(RewardGiven(trajectory_uid="a", prompt_uid="p", value=0.5))
    assert [step.reward for step in (p.take(1) or [[]])[0]] == [0.5, 1.0]


def test_a_deadline_takes_what_was_not_scored_in_time_out_of_its_group() -> None:
    p = two(pool(group_deadline=10.0, on_deadline=OnDeadline.PARTIAL))
    p.take_unscored()
    p.advance(10.0)
    assert not p.judge("a", "p", 1.0)
    assert [step.trajectory_uid for step in (p.take(1) or [[]])[0]] == ["b"]


@pytest.mark.parametrize("unit", Unit)
def test_a_reward_on_a_step_that_is_left_out_is_a_reward_of_its_rollout(unit: Unit) -> None:
    p = pool()
    scored_once_by(p, "t", "task")
    assert offered(p) == []
    (step,) = (p.take(1, unit=unit) or [[]])[0]
    assert (step.uid, step.reward, step.trajectory_return) == ("task", None, 9.0)


def test_steps_that_went_before_the_others_count_as_scored() -> None:
    p = pool()
    p.register(Registration("t", "p"))
    p.submit([make_step(uid="0", reward=1.0)])
    assert p.take(1, unit=Unit.STEPS) is not None
    p.submit([make_step(uid="1", started_at=1)])
    p.complete("t", "p")
    assert offered(p) == []
    assert p.take(1, unit=Unit.STEPS) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_is_a_finite_number(value: float) -> None:
    p = pool()
    p.rollout("t", "p", None)
    with pytest.raises(BadRequest, match="a finite number, not"):
        p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=value))
    with pytest.raises(BadRequest, match="a finite number, not"):
        p.complete("t", "p", value)
    assert p.take(1) is None


def test_rewards_that_come_too_late_are_numbered_on() -> None:
    p = pool()
    p.rollout("t", "p", 1.0)
    leased = p.lease(1)
    assert leased is not None
    assert not p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.0))
    assert p.state.count_late_reward("t") == 2
    p.leasing.ack(leased[0])
    assert [p.state.count_late_reward("t") for _ in range(2)] == [3, 4]


def test_the_stats_of_shards_add_up() -> None:
    p = two(pool())
    fail(p, JudgementOutcome.ERROR, 1)
    p.rollout("c", "q", None)
    p.take_unscored()
    p.judge("c", "q", 1.0)
    p.rollout("d", "r", None)
    both = merge_stats([p.stats(), p.stats()]).scoring
    assert (both.waiting, both.under_way, both.resting, both.scored, both.failed) == (2, 0, 2, 2, {"error": 2})


EVIDENCE = {"rule": "correction", "text": "No, I meant blue"}


def turns(p: EasyPool, count: int, uid: str = "t", *, complete: bool = True) -> None:
    """A trajectory of so many steps without a reward."""
    p.register(Registration(uid, uid))
    p.submit([make_step(uid, uid, uid=f"{uid}-{n}", started_at=n) for n in range(count)])
    if complete:
        p.complete(uid, uid)


def of_steps(*rewards: float | None) -> Score:
    """A score without an outcome reward: evidence for each reward, and none for the last step."""
    known = [EVIDENCE if reward is not None else {"abstained": "nothing said"} for reward in rewards[:-1]]
    return Score(0.0, step_rewards=rewards, step_details=(*known, None), steps_only=True)


def test_steps_that_alone_are_rewarded_leave_the_others_without_a_reward_and_have_their_own_evidence() -> None:
    p = pool()
    turns(p, 3)
    p.take_unscored()
    assert p.judge("t", "t", of_steps(-1.0, None, None))
    batch = p.take(1)
    assert batch is not None
    ((first, second, last),) = batch
    assert [step.reward for step in (first, second, last)] == [-1.0, None, None]
    assert [step.outcome_reward for step in (first, second, last)] == [None] * 3
    assert first.trajectory_return == -1.0
    assert first.metadata == {"reward": EVIDENCE}
    assert second.metadata == {"reward": {"abstained": "nothing said"}}
    assert last.metadata == {"reward": {}}
    scoring = p.stats().scoring
    assert (scoring.scored, scoring.abstained_steps) == (1, 1)


@pytest.mark.parametrize("action", list(OnRewardFailure))
def test_an_abstention_is_not_tried_again_and_goes_where_failures_go(action: OnRewardFailure) -> None:
    p = pool(on_reward_failure=action)
    turns(p, 2)
    p.take_unscored()
    assert p.judge("t", "t", of_steps(None, None))
    assert dict(p.stats().scoring.failed) == {"abstained": 1}
    assert p.stats().scoring.scored == 0
    assert offered(p) == []
    assert dropped(p) == ({} if action is OnRewardFailure.KEEP else {"abstained": 2})
    if action is OnRewardFailure.KEEP:
        p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="t", value=1.0, step_index=0))
        assert p.take(1) is not None


def test_details_of_another_number_of_steps_are_an_error() -> None:
    p = pool()
    turns(p, 2)
    p.take_unscored()
    p.judge("t", "t", Score(1.0, step_details=({"rule": "x"},)))
    assert dict(p.stats().scoring.failed) == {"error": 1}


def test_feedback_for_a_step_takes_the_place_of_the_reward_and_of_its_evidence() -> None:
    p = pool()
    turns(p, 2)
    p.take_unscored()
    p.judge("t", "t", of_steps(-1.0, None))
    p.ingest.reward(RewardGiven(trajectory_uid="t", prompt_uid="t", value=0.5, source="thumbs", step_index=0))
    batch = p.take(1)
    assert batch is not None
    step = batch[0][0]
    assert (step.reward, step.reward_source, step.reward_revision) == (0.5, "thumbs", 2)
    assert step.metadata["reward"] == {}


def judged_by_step(p: EasyPool, *rewards: float | None, uid: str = "t") -> list[str]:
    """A worker that judges by step takes the trajectory and judges its steps. Returns what it saw."""
    (steps,) = p.take_unscored(by_step=True)
    seen = [step.uid for step in steps]
    assert p.judge(uid, uid, of_steps(*rewards), steps=seen)
    return seen


def more(p: EasyPool, number: int, uid: str = "t") -> None:
    p.submit([make_step(uid, uid, uid=f"{uid}-{number}", started_at=number)])


def open_steps(p: EasyPool) -> list[tuple[str, float | None]]:
    """What a trainer of single steps gets."""
    taken = p.take(1, unit=Unit.STEPS)
    return [] if taken is None else [(step.uid, step.reward) for group in taken for step in group]


def by_step_offers(p: EasyPool) -> list[str]:
    found = [steps[0].trajectory_uid for steps in p.take_unscored(100, "look", seconds=0.0, by_step=True)]
    p.advance(p.state.now)
    return found


def test_a_step_of_an_open_trajectory_is_judged_and_trained_as_soon_as_the_next_one_is_there() -> None:
    p = pool()
    turns(p, 1, complete=False)
    assert by_step_offers(p) == []
    more(p, 1)
    assert judged_by_step(p, 1.0, None) == ["t-0", "t-1"]
    assert by_step_offers(p) == []
    assert open_steps(p) == [("t-0", 1.0)]
    assert open_steps(p) == []
    more(p, 2)
    assert judged_by_step(p, -1.0, None) == ["t-1", "t-2"]
    assert open_steps(p) == [("t-1", -1.0)]


def test_a_quarantined_step_tells_nothing_of_the_one_before_it() -> None:
    p = pool()
    turns(p, 1, complete=False)
    p.submit([make_step("t", "t", uid="bad", started_at=1, quarantine="bad_logprob: test")])
    assert by_step_offers(p) == []
    more(p, 2)
    assert judged_by_step(p, 1.0, None) == ["t-0", "t-2"]
    p.submit([make_step("t", "t", uid="worse", started_at=3, quarantine="bad_logprob: test")])
    assert by_step_offers(p) == []


def test_workers_that_judge_whole_trajectories_get_no_open_one() -> None:
    p = pool()
    turns(p, 2, complete=False)
    assert by_step_offers(p) == ["t"]
    assert offered(p) == []


def test_steps_that_a_judgement_abstains_from_are_not_sent_again() -> None:
    p = pool()
    turns(p, 2, complete=False)
    judged_by_step(p, None, None)
    more(p, 2)
    assert judged_by_step(p, 0.5, None) == ["t-1", "t-2"]
    assert p.stats().scoring.abstained_steps == 1


def test_a_step_of_which_nothing_is_known_yet_is_judged_again_when_more_is_known() -> None:
    """A sub-agent speaks before its caller goes on."""
    p = pool()
    turns(p, 2, complete=False)
    (steps,) = p.take_unscored(by_step=True)
    unknown = Score(0.0, step_rewards=(None, None), step_details=(None, None), steps_only=True)
    assert p.judge("t", "t", unknown, steps=[step.uid for step in steps])
    assert by_step_offers(p) == []
    more(p, 2)
    assert judged_by_step(p, 1.0, None, None) == ["t-0", "t-1", "t-2"]


def test_a_judgement_counts_for_the_steps_that_it_saw_though_another_one_came() -> None:
    p = pool()
    turns(p, 2, complete=False)
    p.take_unscored(by_step=True)
    more(p, 2)
    assert p.judge("t", "t", of_steps(1.0, None), steps=["t-0", "t-1"])
    assert by_step_offers(p) == ["t"]
    assert judged_by_step(p, -1.0, None) == ["t-1", "t-2"]


@pytest.mark.parametrize("when", ["before", "while it is judged", "after"])
def test_feedback_wins_whenever_it_comes(when: str) -> None:
    p = pool()
    turns(p, 3, complete=False)
    thumb = RewardGiven(trajectory_uid="t", prompt_uid="t", value=0.25, source="thumbs", step_index=0)
    if when == "before":
        p.ingest.reward(thumb)
    p.take_unscored(by_step=True)
    if when == "while it is judged":
        p.ingest.reward(thumb)
    assert p.judge("t", "t", of_steps(-1.0, 1.0, None), steps=["t-0", "t-1", "t-2"])
    if when == "after":
        p.ingest.reward(thumb)
    p.complete("t", "t")
    judged_by_step(p, None)
    batch = p.take(1)
    assert batch is not None
    assert [(step.reward, step.reward_source) for step in batch[0]] == [(0.25, "thumbs"), (1.0, "judge"), (None, "")]


def test_a_complete_trajectory_is_ready_when_its_last_steps_are_judged() -> None:
    p = pool()
    turns(p, 2, complete=False)
    judged_by_step(p, 1.0, None)
    more(p, 2)
    p.complete("t", "t")
    assert p.take(1) is None
    judged_by_step(p, -1.0, None)
    batch = p.take(1)
    assert batch is not None
    assert [step.reward for step in batch[0]] == [1.0, -1.0, None]


def test_a_complete_trajectory_without_evidence_goes_where_failures_go() -> None:
    p = pool()
    turns(p, 1)
    judged_by_step(p, None)
    assert dropped(p) == {"abstained": 1}


def test_an_open_trajectory_that_cannot_be_judged_goes_on() -> None:
    p = pool(reward_attempts=1)
    turns(p, 2, complete=False)
    p.take_unscored(by_step=True)
    assert p.judge("t", "t", JudgementOutcome.ERROR)
    assert by_step_offers(p) == []
    assert dropped(p) == {}
    more(p, 2)
    assert judged_by_step(p, 1.0, -1.0, None) == ["t-0", "t-1", "t-2"]


def test_a_person_who_relabels_an_open_trajectory_ends_its_judgement_by_step() -> None:
    p = pool()
    turns(p, 2, complete=False)
    curation = Curation(action=CurationAction.RELABEL, trajectory_uid="t", prompt_uid="t", by="ann", reward=1.0)
    p.take_unscored(by_step=True)
    p.curator.curate(curation)
    assert not p.judge("t", "t", of_steps(-1.0, None), steps=["t-0", "t-1"])
    assert by_step_offers(p) == []
