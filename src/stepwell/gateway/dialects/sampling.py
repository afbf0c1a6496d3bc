"""How a response is sampled: every parameter explicit, and whether the response may be trained on.

An engine takes parameters that a request leaves out from the model's files. So the request leaves none out, and a step
records the parameters that were in force.
"""

from collections.abc import Mapping
from typing import Any

from stepwell.engines.engine import EXTRA_SAMPLING
from stepwell.errors import BadRequest

DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
ALL_DEFAULTS = (*DEFAULTS.items(), *EXTRA_SAMPLING.items())
RECORDED = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "bad_words"),
    *("allowed_token_ids", "response_format", "structured_outputs", "tool_choice", "parallel_tool_calls"),
    *("use_beam_search", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""The fields of a request that its step keeps."""
CONSTRAINTS = (
    *("structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Fields that, if set, keep the model from tokens that it would have written."""


def make_explicit(request: dict[str, Any], response_length: int) -> None:
    """Fill in every parameter that the engine would choose by itself."""
    for name, value in ALL_DEFAULTS:
        given = request.get(name)
        if given is None:
            request[name] = value
        elif type(given) not in (int, float):
            raise BadRequest(f"{name} must be a number, not {_shown(given)}")
    request["max_tokens"] = _max_tokens(request, response_length)
    request.pop("max_completion_tokens", None)


def recorded_sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: request[name] for name in RECORDED if name in request}


def why_untrainable(request: Mapping[str, Any]) -> str | None:
    """Why a response sampled like this does not represent the policy, as "kind: text"; None if it does."""
    if request["temperature"] == 0:
        return "greedy: temperature is 0"
    if request.get("use_beam_search"):
        return "greedy: use_beam_search is set"
    for name, off in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
        if request[name] != off:
            return f"penalties: {name} is {request[name]}"
    return why_constrained(request)


def why_constrained(request: Mapping[str, Any]) -> str | None:
    """What keeps the model from tokens that it would have written, as "constrained: text"; None if nothing does."""
    for name in CONSTRAINTS:
        if request.get(name):
            return f"constrained: {name} is set"
    response_format, tool_choice = request.get("response_format"), request.get("tool_choice")
    if isinstance(response_format, dict) and response_format.get("type") not in (None, "text"):
        return f"constrained: response_format is {_shown(response_format['type'])}"
    if tool_choice is not None and tool_choice not in ("auto", "none"):
        return "constrained: tool_choice demands a call"
    return None


def _max_tokens(request: Mapping[str, Any], response_length: int) -> int:
    """At most `response_length`. max_completion_tokens is OpenAI's newer name and takes precedence, as in vLLM."""
    for name in ("max_completion_tokens", "max_tokens"):
        asked = request.get(name)
        if asked is not None:
            if type(asked) is not int or asked < 1:
                raise BadRequest(f"{name} must be a whole number of at least 1, not {_shown(asked)}")
            return min(asked, response_length)
    return response_length


def _shown(value: object) -> str:
    return str(value)[:40]
