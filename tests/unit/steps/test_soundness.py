from typing import Any

import numpy as np
import pytest
from stepwell.steps.trainable import fault_kind, step_fault, usage_fault

from rig.builders import make_step
from stepwell.steps.step import logprobs_array


def test_a_sound_step_has_no_fault() -> None:
    step = make_step(response_mask=np.array([True, False]), reward=0.0)
    assert step_fault(step) is None
    assert usage_fault("prompt", 2, 2) is None
    assert usage_fault("prompt", 2, None) is None


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"prompt_ids": []}, "no_prompt_ids"),
        ({"response_ids": []}, "no_response_ids"),
        ({"prompt_ids": [-1]}, "negative_id"),
        ({"response_ids": [5, -100]}, "negative_id"),
        ({"reward": float("nan")}, "bad_reward"),
        ({"reward": float("-inf")}, "bad_reward"),
        ({"response_mask": np.array([True])}, "mask_count"),
        ({"response_logprobs": logprobs_array([-1.0])}, "logprob_count"),
        ({"response_logprobs": logprobs_array([-1.0, float("nan")])}, "bad_logprob"),
        ({"response_logprobs": logprobs_array([-1.0, float("-inf")])}, "bad_logprob"),
        ({"response_logprobs": logprobs_array([-1.0, 0.5])}, "bad_logprob"),
        ({"response_logprobs": logprobs_array([-1.0, -9999.0])}, "bad_logprob"),
    ],
)
def test_a_fault_is_named(fields: dict[str, Any], kind: str) -> None:
    fault = step_fault(make_step(**fields))
    assert fault is not None
    assert fault_kind(fault) == kind


def test_ids_that_contradict_the_engines_count_are_a_fault() -> None:
    assert usage_fault("response", 3, 4) == "response_count: 3 response ids, but usage says 4"
