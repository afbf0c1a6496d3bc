from dataclasses import replace
from typing import Any

import pytest

from stepwell.envs.config import BaseEnvConfig, EvalHandling
from stepwell.envs.loop.pace import PaceTerms, Situation, decide, max_workers
from stepwell.wire.scored_groups import EnvStatus


def terms_with(**config: Any) -> PaceTerms:
    return PaceTerms(
        BaseEnvConfig(**{"steps_per_eval": 10, **config}),
        batch_size=8,
        max_workers=10,
        total_steps=100,
        checkpoint_interval=5,
    )


TERMS = terms_with()
NOW = Situation(status=EnvStatus(current_step=0, queue_size=0), running=0, evaluated_at=0, checkpointed_at=0)


def at(step: int = 0, *, queue_size: int = 0, self_queue_size: int = 0, unallocated: float = 1.0) -> EnvStatus:
    return EnvStatus(
        current_step=step,
        queue_size=queue_size,
        self_queue_size=self_queue_size,
        unallocated_fraction=unallocated,
    )


@pytest.mark.parametrize(
    ("queue", "running", "start"),
    [(0, 0, 6), (4, 0, 2), (4, 1, 1), (4, 2, 0), (6, 0, 0), (4, 5, 0), (60, 0, 0)],
)
def test_what_waits_and_what_runs_stay_within_the_off_policy_limit(queue: int, running: int, start: int) -> None:
    assert decide(TERMS, replace(NOW, status=at(queue_size=queue), running=running)).start == start


def test_no_more_run_than_there_are_workers() -> None:
    terms = terms_with(max_batches_offpolicy=0)
    assert decide(terms, replace(NOW, status=at(queue_size=1_000))).start == 10
    assert decide(terms, replace(NOW, running=10)).start == 0


def test_a_pause_says_why_and_full_work_is_no_pause() -> None:
    assert decide(TERMS, replace(NOW, status=at(queue_size=6))).idle == "enough waits for the trainer"
    assert decide(TERMS, replace(NOW, running=6)).idle == "enough waits for the trainer"
    assert decide(terms_with(max_batches_offpolicy=0), replace(NOW, running=10)).idle == ""
    assert decide(TERMS, NOW).idle == ""


def test_shares_kept_for_others_leave_less_room() -> None:
    assert decide(TERMS, replace(NOW, status=at(unallocated=0.5))).start == 3


def test_an_environment_without_any_share_still_gets_a_turn_when_nothing_waits() -> None:
    assert decide(TERMS, replace(NOW, status=at(unallocated=0.0))).start == 1
    assert decide(TERMS, replace(NOW, status=at(unallocated=0.0, queue_size=1))).start == 0


def test_an_own_share_is_filled_however_much_others_have_queued() -> None:
    terms = terms_with(min_batch_allocation=0.5)
    none, two, three = (at(unallocated=0.5, queue_size=50, self_queue_size=own) for own in (0, 2, 3))
    assert decide(terms, replace(NOW, status=none)).start == 3
    assert decide(terms, replace(NOW, status=two)).start == 1
    assert decide(terms, replace(NOW, status=two, running=1)).start == 0
    assert decide(terms, replace(NOW, status=three)).idle == "enough waits for the trainer"


@pytest.mark.parametrize(
    ("handling", "start"), [(EvalHandling.STOP_TRAIN, 0), (EvalHandling.LIMIT_TRAIN, 5), (EvalHandling.NONE, 10)]
)
def test_an_evaluation_holds_new_work_back_as_configured(handling: EvalHandling, start: int) -> None:
    terms = terms_with(eval_handling=handling, max_batches_offpolicy=0)
    assert decide(terms, replace(NOW, is_evaluating=True)).start == start
    begins = decide(terms, replace(NOW, status=at(10)))
    assert (begins.evaluate, begins.start) == (True, start)


@pytest.mark.parametrize(
    ("step", "evaluated_at", "due"), [(9, 0, False), (10, 0, True), (13, 8, True), (19, 10, False)]
)
def test_an_evaluation_is_due_once_for_every_interval_even_if_steps_are_skipped(
    step: int, evaluated_at: int, due: bool
) -> None:
    assert decide(TERMS, replace(NOW, status=at(step), evaluated_at=evaluated_at)).evaluate is due


def test_an_evaluation_that_is_due_while_one_runs_begins_after_it() -> None:
    now = replace(NOW, status=at(20), evaluated_at=10)
    assert not decide(TERMS, replace(now, is_evaluating=True)).evaluate
    assert decide(TERMS, now).evaluate


def test_no_evaluations_where_none_are_wanted() -> None:
    assert not decide(terms_with(steps_per_eval=0), replace(NOW, status=at(50))).evaluate


@pytest.mark.parametrize(("step", "last", "due"), [(4, 0, None), (5, 0, 5), (12, 5, 10), (12, 10, None), (7, 7, None)])
def test_a_checkpoint_is_due_at_the_last_multiple_of_the_interval(step: int, last: int, due: int | None) -> None:
    assert decide(TERMS, replace(NOW, status=at(step), checkpointed_at=last)).checkpoint == due
    assert decide(replace(TERMS, checkpoint_interval=0), replace(NOW, status=at(step))).checkpoint is None


def test_the_work_is_over_at_the_last_step_or_without_items_or_when_told() -> None:
    assert decide(TERMS, replace(NOW, status=at(99))).finished == ""
    assert decide(TERMS, replace(NOW, status=at(100))).finished == "the trainer is at step 100 of 100"
    assert decide(TERMS, replace(NOW, has_ended=True, running=1)).finished == ""
    assert decide(TERMS, replace(NOW, has_ended=True)).finished == "there are no more items"
    assert decide(TERMS, replace(NOW, is_stopping=True, running=3)).finished == "told to stop"
    assert decide(TERMS, replace(NOW, is_stopping=True)).start == 0


def test_after_a_failure_nothing_is_started_for_a_while() -> None:
    assert decide(TERMS, replace(NOW, is_pausing=True)).start == 0


def test_workers_are_counted_by_servers_unless_told() -> None:
    assert max_workers(BaseEnvConfig(), servers=3) == 24
    assert max_workers(BaseEnvConfig(max_num_workers=5), servers=3) == 5
