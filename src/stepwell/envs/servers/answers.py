"""What a server's answer tells of its tokens: all of it, where it gives ids, as the gateway and vLLM do."""

from collections.abc import Mapping
from typing import Any

from stepwell.envs.servers.sequences import Turn
from stepwell.errors import EngineUnavailable
from stepwell.steps.soundness import logprobs_fault
from stepwell.steps.step import Exactness
from stepwell.wire.openai import Sampled, read_sampled


def read_turn(reply: dict[str, Any], choice: dict[str, Any]) -> Turn | None:
    """One choice; None where it comes without its ids."""
    sampled = read_sampled(reply, choice)
    if not len(sampled.prompt_ids) or not len(sampled.response_ids):
        return None
    exactness = Exactness.RETOKENIZED if choice.get("exactness") == Exactness.RETOKENIZED else Exactness.ENGINE
    return turn_of(sampled, exactness, choice)


def turn_of(sampled: Sampled, exactness: Exactness, choice: Mapping[str, Any]) -> Turn:
    """Log-probabilities that do not fit ids of the engine's own are a fault; beside other ids they are left out."""
    logprobs, version = sampled.logprobs, choice.get("policy_version")
    fault = None if logprobs is None else logprobs_fault(logprobs, len(sampled.response_ids))
    if fault is not None and exactness is Exactness.ENGINE:
        raise EngineUnavailable(f"the server's answer cannot be trained on: {fault}")
    return Turn(
        prompt_ids=sampled.prompt_ids,
        response_ids=sampled.response_ids,
        logprobs=None if fault is not None else logprobs,
        exactness=exactness,
        finish_reason=sampled.finish_reason,
        policy_version=version if isinstance(version, int) else None,
    )
