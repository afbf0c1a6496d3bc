"""Turns, written down by eye."""

from stepwell.envs.servers.sequences import SampledTurn
from stepwell.steps.step import Exactness, ids_array, logprobs_array


def turn(
    prompt: str,
    response: str,
    *,
    logprob: float | None = -0.5,
    version: int | None = None,
    exactness: Exactness = Exactness.ENGINE,
    finish_reason: str = "stop",
) -> SampledTurn:
    """One id a letter."""
    return SampledTurn(
        prompt_ids=ids_array(list(prompt.encode())),
        response_ids=ids_array(list(response.encode())),
        logprobs=None if logprob is None else logprobs_array([logprob] * len(response)),
        exactness=exactness,
        finish_reason=finish_reason,
        policy_version=version,
    )
