from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from stepwell.steps.trainable import fault_kind

from stepwell.gateway.recording import step_builder
from stepwell.gateway.recording.step_builder import PendingStep
from stepwell.steps.step import Exactness, VersionSpan, ids_array, logprobs_array
from stepwell.wire.openai import Sampled, Usage

BEGUN = PendingStep("t", "p", policy_version=5, started_at=123.0, sampling={"temperature": 1.0})
build_steps = partial(step_builder.build_steps, prompt_length=4, told={"exactness": Exactness.ENGINE})
SAMPLED = Sampled(ids_array([1, 2, 3]), ids_array([7, 8]), logprobs_array([-0.5, -1.5]), "stop")
USAGE = Usage(3, 2)


def test_a_step_holds_what_the_engine_sampled_and_what_was_known_of_the_call() -> None:
    (step,) = build_steps(BEGUN, [SAMPLED], USAGE)
    assert step.quarantine is None
    assert (step.trajectory_uid, step.prompt_uid, step.policy_version, step.started_at) == ("t", "p", 5, 123.0)
    assert (step.prompt_ids.tolist(), step.response_ids.tolist()) == ([1, 2, 3], [7, 8])
    assert step.response_logprobs is not None
    assert step.response_logprobs.tolist() == [-0.5, -1.5]
    assert (step.exactness, step.finish_reason, step.sampling) == (Exactness.ENGINE, "stop", {"temperature": 1.0})
    assert step.reward is None
    assert step.model == ""
    (step,) = build_steps(BEGUN, [replace(SAMPLED, model="lora-7")], USAGE)
    assert step.model == "lora-7"


def test_each_choice_is_a_step_of_its_own_and_usage_counts_them_together() -> None:
    steps = build_steps(BEGUN, [SAMPLED, SAMPLED], Usage(3, 4), choices_per_prompt=2)
    assert [step.quarantine for step in steps] == [None, None]
    assert len({step.uid for step in steps}) == 2


@pytest.mark.parametrize(
    ("changes", "usage", "kind"),
    [
        ({"response_ids": ids_array([])}, USAGE, "no_response_ids"),
        ({"prompt_ids": ids_array([])}, USAGE, "no_prompt_ids"),
        ({"response_ids": ids_array([7])}, USAGE, "logprob_count"),
        ({"logprobs": None}, USAGE, "no_logprobs"),
        ({"logprobs": logprobs_array([-0.5, float("nan")])}, USAGE, "bad_logprob"),
        ({"logprobs": logprobs_array([-0.5, -9999.0])}, USAGE, "bad_logprob"),
        ({}, Usage(3, 3), "response_count"),
        ({}, Usage(4, 2), "prompt_count"),
        ({"prompt_ids": ids_array(range(5))}, Usage(5, 2), "prompt_too_long"),
        ({"finish_reason": "abort"}, USAGE, "cut_short"),
        ({"finish_reason": "error"}, USAGE, "cut_short"),
    ],
)
def test_what_does_not_add_up_is_quarantined_with_its_reason(changes: dict[str, Any], usage: Usage, kind: str) -> None:
    (step,) = build_steps(BEGUN, [replace(SAMPLED, **changes)], usage)
    assert step.quarantine is not None
    assert fault_kind(step.quarantine) == kind


def test_spans_that_the_engine_told_say_the_version_of_the_oldest_token() -> None:
    spans = (VersionSpan(6, 0, 1), VersionSpan(7, 1, 2))
    (step,) = build_steps(BEGUN, [replace(SAMPLED, version_spans=spans)], USAGE)
    assert (step.policy_version, step.version_spans) == (6, spans)


def test_prompts_are_counted_once_for_all_their_choices() -> None:
    other = replace(SAMPLED, prompt_ids=ids_array([1, 2]))
    two_each = partial(build_steps, BEGUN, [SAMPLED, SAMPLED, other, other], choices_per_prompt=2)
    steps = two_each(usage=Usage(5, 8))
    assert [step.quarantine for step in steps] == [None] * 4
    steps = two_each(usage=Usage(10, 8))
    assert all(step.quarantine for step in steps)


def test_a_step_encoded_again_needs_no_logprobs() -> None:
    told = {"exactness": Exactness.RETOKENIZED}
    (step,) = build_steps(BEGUN, [replace(SAMPLED, logprobs=None)], USAGE, told=told)
    assert (step.quarantine, step.exactness) == (None, Exactness.RETOKENIZED)


def test_an_answer_without_an_end_is_cut_short() -> None:
    (step,) = build_steps(BEGUN, [replace(SAMPLED, finish_reason=None)], USAGE)
    assert step.quarantine is not None
    assert fault_kind(step.quarantine) == "cut_short"
