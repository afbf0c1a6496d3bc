"""Rollouts as clients of a pool send them."""

from functools import cache

import numpy as np

from benchmarks.footprint import PROMPT, RESPONSE
from stepwell.pool.api.producing import TRAIN, Registration
from stepwell.steps.step import FloatArray, IntArray, Step, logprobs_array


@cache
def _tokens() -> tuple[IntArray, IntArray, FloatArray]:
    luck = np.random.default_rng(0)
    prompt, response = (luck.integers(0, 150_000, length, dtype=np.int32) for length in (PROMPT, RESPONSE))
    return prompt, response, logprobs_array(-luck.random(RESPONSE))


def group_of(prompt_uid: str, size: int, missing: int = 0) -> tuple[list[Step], list[Registration]]:
    """Complete trajectories of one step each, of a group in which so many are missing."""
    prompt_ids, response_ids, logprobs = _tokens()
    uids = [f"{prompt_uid}-{n}" for n in range(size)]
    steps = [
        Step(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_logprobs=logprobs,
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            uid=f"{uid}-0",
            step_index=0,
            is_last=True,
            reward=1.0,
        )
        for uid in uids
    ]
    return steps, [Registration(uid, prompt_uid, TRAIN, size + missing) for uid in uids]
