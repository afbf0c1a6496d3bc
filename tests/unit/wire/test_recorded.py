from dataclasses import replace
from typing import Any

import pytest

from stepwell.core.soundness import fault_kind
from stepwell.core.step import Exactness, ids_array, logprobs_array
from stepwell.wire.reading import Sampled, Usage
from stepwell.wire.recorded import CallContext, recorded_steps

CONTEXT = CallContext("t", "p", 5, 123.0, {"temperature": 1.0}, prompt_length=4)
SAMPLED = Sampled(ids_array([1, 2, 3]), ids_array([7, 8]), logprobs_array([-0.5, -1.5]), "stop")
USAGE = Usage(3, 2)


def test_a_step_holds_what_the_engine_sampled_and_what_was_known_of_the_call() -> None:
    (step,) = recorded_steps(CONTEXT, [SAMPLED], USAGE)
    assert step.quarantine is None
    assert (step.trajectory_uid, step.prompt_uid, step.policy_version, step.started_at) == ("t", "p", 5, 123.0)
    assert (step.prompt_ids.tolist(), step.response_ids.tolist()) == ([1, 2, 3], [7, 8])
    assert step.response_logprobs is not None
    assert step.response_logprobs.tolist() == [-0.5, -1.5]
    assert (step.exactness, step.finish_reason, step.sampling) == (Exactness.ENGINE, "stop", {"temperature": 1.0})
    assert step.reward is None


def test_each_choice_is_a_step_of_its_own_and_usage_counts_them_together() -> None:
    steps = recorded_steps(CONTEXT, [SAMPLED, SAMPLED], Usage(3, 4))
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
    (step,) = recorded_steps(CONTEXT, [replace(SAMPLED, **changes)], usage)
    assert step.quarantine is not None
    assert fault_kind(step.quarantine) == kind
