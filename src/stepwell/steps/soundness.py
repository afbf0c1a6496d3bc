"""Checks whether a step can be trained, once, when it arrives.

Every check returns the reason why not, or None. A recorded step that fails is quarantined with the reason; a submitted
one is refused with it.
"""

import math

import numpy as np

from stepwell.steps.step import FloatArray, Step

lowest, highest = np.minimum.reduce, np.maximum.reduce
"""The methods of an array take longer, which counts for short arrays."""
LOGPROB_FLOOR = -9999.0
"""vLLM's value for a missing log-probability."""


def step_fault(step: Step) -> str | None:
    """Why `step` cannot be trained, or None."""
    if len(step.prompt_ids) == 0:
        return "no_prompt_ids: the step has no prompt token ids"
    if len(step.response_ids) == 0:
        return "no_response_ids: the step has no response token ids"
    if lowest(step.prompt_ids) < 0 or lowest(step.response_ids) < 0:
        return "negative_id: a token id is negative"
    if step.reward is not None and not math.isfinite(step.reward):
        return f"bad_reward: the reward is {step.reward}"
    if step.response_mask is not None and len(step.response_mask) != len(step.response_ids):
        return f"mask_count: {len(step.response_mask)} mask entries for {len(step.response_ids)} response tokens"
    if step.response_logprobs is not None:
        return logprobs_fault(step.response_logprobs, len(step.response_ids))
    return None


def logprobs_fault(logprobs: FloatArray, response_tokens: int) -> str | None:
    """Why these log-probabilities cannot belong to a response of that length, or None."""
    if len(logprobs) != response_tokens:
        return f"logprob_count: {len(logprobs)} log-probabilities for {response_tokens} response tokens"
    if response_tokens and lowest(logprobs) > LOGPROB_FLOOR and highest(logprobs) <= 0:  # a NaN fails this
        return None
    if not np.isfinite(logprobs).all():
        return "bad_logprob: a log-probability is not finite"
    if (logprobs > 0).any():
        return f"bad_logprob: a log-probability is positive ({float(logprobs.max())})"
    if (logprobs <= LOGPROB_FLOOR).any():
        return "bad_logprob: a log-probability is missing (the engine's floor value)"
    return None


def usage_fault(kind: str, ids: int, counted: int | None) -> str | None:
    """Why the number of ids contradicts the engine's count, or None. Without a count there is no contradiction."""
    if counted is None or counted == ids:
        return None
    return f"{kind}_count: {ids} {kind} ids, but usage says {counted}"


def fault_kind(fault: str) -> str:
    """The kind under which a reason is counted: the word before its colon."""
    return fault.partition(":")[0]
