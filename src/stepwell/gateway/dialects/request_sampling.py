"""How a response is sampled: every parameter explicit, as the agent asks or as the trainer computes.

An engine takes parameters that a request leaves out from the model's files. So the request leaves none out, and a step
records the parameters that were in force.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepwell.engines.engine import EXTRA_SAMPLING
from stepwell.errors import BadRequest
from stepwell.steps.trainable import PENALTIES, TRUNCATIONS, strict_functions

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
    *("thinking_token_budget", "watermarking"),
)
"""The fields of a request that its step keeps."""
SWITCHED_OFF = {**PENALTIES, **{name: values[0] for name, values in TRUNCATIONS.items()}}
REPLACED = "replaced"
"""The key in a step's `sampling` for what the agent asked for and did not get."""
RELAXED = (
    *("use_beam_search", "logit_bias", "bad_words", "min_tokens", "ignore_eos", "thinking_token_budget"),
    "watermarking",
)
"""Fields that on-policy sampling removes. Formats and demanded tool calls stay: agents could not read other answers."""


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """Whose sampling parameters count for the calls of a channel."""

    on_policy: bool = False
    """Sample as the trainer computes: at its temperature, from the whole vocabulary, without penalties."""
    temperature: float = 1.0
    """The trainer's temperature."""
    of_sessions: bool = False
    """Whether the policy also holds for calls that are no rollout's: live users' sessions, and calls that are not
    recorded."""

    def apply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change an explicit request in place. Returns what the agent asked for and does not get."""
        if not self.on_policy:
            return {}
        wanted = {"temperature": self.temperature, **SWITCHED_OFF}
        replaced = {name: request[name] for name, value in wanted.items() if request[name] != value}
        request |= wanted
        replaced |= {name: request.pop(name) for name in RELAXED if request.get(name)}
        if request.get("tools") and request.get("tool_choice") in (None, "auto"):
            replaced |= _relax_tools(request)
        return replaced


AS_ASKED = SamplingPolicy()


def policy_for(policies: Mapping[str, SamplingPolicy], channel: str, *, is_rollout: bool) -> SamplingPolicy:
    """The policy of a channel for a call. Live users get what they ask for, unless the policy is for sessions too."""
    policy = policies.get(channel, AS_ASKED)
    return policy if is_rollout or policy.of_sessions else AS_ASKED


def _relax_tools(request: dict[str, Any]) -> dict[str, Any]:
    """Without a grammar, the model writes its calls by itself, and may write several."""
    replaced: dict[str, Any] = {}
    if request.get("parallel_tool_calls") is False:
        replaced["parallel_tool_calls"] = request.pop("parallel_tool_calls")
    strict = strict_functions(request["tools"])
    for function in strict:
        del function["strict"]
    return {**replaced, "strict_tools": len(strict)} if strict else replaced


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


def told_sampling(request: Mapping[str, Any], replaced: Mapping[str, Any]) -> str:
    """The sampling in force in place of what the agent asked for: `temperature=1.0;was=0.2, logit_bias=removed`."""
    return ", ".join(
        f"{name}={request[name]};was={value}" if name in request else f"{name}=removed"
        for name, value in replaced.items()
    )


def recorded_sampling(request: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    recorded = {name: request[name] for name in RECORDED if name in request}
    return {**recorded, REPLACED: dict(replaced)} if replaced else recorded


def _max_tokens(request: Mapping[str, Any], response_length: int) -> int:
    """The most tokens of a response, at most `response_length`. max_completion_tokens is OpenAI's newer name and takes
    precedence, as in vLLM."""
    for name in ("max_completion_tokens", "max_tokens"):
        asked = request.get(name)
        if asked is not None:
            if type(asked) is not int or asked < 1:
                raise BadRequest(f"{name} must be a whole number of at least 1, not {_shown(asked)}")
            return min(asked, response_length)
    return response_length


def _shown(value: object) -> str:
    return str(value)[:40]
