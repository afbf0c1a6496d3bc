"""The part of a request that reaches an engine: its listed fields, with every sampling parameter explicit.

- A field that is not listed is removed: engines have fields by which a request reaches beyond itself, and every release
  adds some. An operator may list more of them, but none of PRIVATE_FIELDS.
- An engine takes parameters that a request leaves out from the model's files. So the request leaves none out, as the
  agent asks or as the trainer computes, and a step records the parameters that were in force.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stepwell.engines import PRIVATE_FIELDS
from stepwell.engines.engine import EXTRA_SAMPLING
from stepwell.errors import BadRequest
from stepwell.steps.trainable import PENALTIES, TRUNCATIONS, is_text_part, strict_functions
from stepwell.wire.openai import Upstream

COMMON = frozenset(
    (
        *("model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "logprobs"),
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "bad_words", "allowed_token_ids"),
        *("response_format", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens"),
        "thinking_token_budget",
    )
)
CHAT = COMMON | {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "reasoning_effort"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
}
COMPLETIONS = COMMON | {"prompt", "suffix"}
LISTED: Mapping[Upstream, frozenset[str]] = {Upstream.CHAT: CHAT, Upstream.COMPLETIONS: COMPLETIONS}
FOR_THE_GATEWAY = frozenset(("return_token_ids", "include_reasoning"))
"""The agent's wishes to the gateway. An engine kind asks for ids and reasoning in its own way."""
WITHOUT_EFFECT = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "verbosity"),
        *("safety_identifier", "prediction", "modalities", "web_search_options", "echo"),
    )
)
"""Fields of OpenAI's own API that engines do not know. Many clients send them; their removal needs no word."""
TEMPLATE_SWITCHES = frozenset(
    ("enable_thinking", "thinking", "preserve_thinking", "clear_thinking", "reasoning_effort", "thinking_budget")
)
"""The switches of a chat template that a request may set, to a plain value."""
MEDIA = "_url"
"""How the name of a part's field ends that holds an address: image_url, video_url, audio_url."""
SHOWN = 40
"""Characters of a field's name."""
DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
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
class RequestRules:
    """The fields that an operator allows beside the listed ones."""

    fields: frozenset[str] = frozenset()
    media_hosts: frozenset[str] = frozenset()
    """Hosts from which an engine may fetch what a message shows, over https. Without any, it must be in the request."""
    calls_as_text: bool = False
    """Chat clients parse the model's tool calls themselves: the engine leaves them in the text."""

    def __post_init__(self) -> None:
        if private := sorted(self.fields & PRIVATE_FIELDS):
            raise BadRequest(f"{', '.join(private)}: by this, a request reaches beyond itself; it is never forwarded")

    def apply(self, request: dict[str, Any], upstream: Upstream) -> tuple[str, ...]:
        """Change a request in place. Returns the names of what was removed and could have had an effect."""
        removed: list[str] = []
        listed, more = LISTED[upstream], self.fields
        for name in [name for name in request if name not in listed and name not in more]:
            del request[name]
            if name not in FOR_THE_GATEWAY and name not in WITHOUT_EFFECT:
                removed.append(name[:SHOWN])
        if "chat_template_kwargs" in request and "chat_template_kwargs" not in self.fields:
            removed += _keep_switches(request)
        if upstream is Upstream.CHAT:
            self._check_media(request["messages"])
        return tuple(sorted(removed)) if removed else ()

    def _check_media(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            content = message.get("content")
            if type(content) is list:
                for part in content:
                    self._check_part(part)

    def _check_part(self, part: object) -> None:
        if not isinstance(part, dict) or is_text_part(part):
            return
        for name, media in part.items():
            if name.endswith(MEDIA) and media is not None:
                self._check_address(media.get("url") if isinstance(media, dict) else media, name[:SHOWN])

    def _check_address(self, url: object, kind: str) -> None:
        if isinstance(url, str) and url[:5].lower() == "data:":
            return
        try:
            address = urlsplit(url) if isinstance(url, str) else None
            if address and address.scheme == "https" and address.netloc.lower() in self.media_hosts:
                return
        except ValueError:
            pass
        allowed = ", ".join(sorted(self.media_hosts))
        raise BadRequest(
            f"{kind} must be in the request, as a data: URL"
            + (f", or at https:// of one of these hosts: {allowed}" if allowed else "; other addresses are not fetched")
        )


NO_MORE = RequestRules()


def _keep_switches(request: dict[str, Any]) -> list[str]:
    given = request.pop("chat_template_kwargs")
    if not isinstance(given, dict):
        return [] if given is None else ["chat_template_kwargs"]
    kept = {
        name: value
        for name, value in given.items()
        if name in TEMPLATE_SWITCHES and isinstance(value, (str, int, float, bool, type(None)))
    }
    if kept:
        request["chat_template_kwargs"] = kept
    return [f"chat_template_kwargs.{name[:SHOWN]}" for name in given.keys() - kept.keys()]


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
