"""Which distribution a response was sampled from, and whether a trainer computes with the same one.

A trainer computes log softmax(logits / temperature) over the whole vocabulary. A response that was sampled otherwise,
by another model, or from a prompt that is more than its tokens, is not trained on unless the consumer asks for it.
`untrainable_reason` decides this for every path by which a step comes into being.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.steps.step import JsonObject, Step
from stepwell.steps.trainable import fault_kind

SIDE_CALL = "side_call"
"""The kind of a step that an agent's harness made for itself. Leaving it out is no loss."""
REDACTED = "redacted"
"""The kind of a step with masked tokens, and in its extras: the id of the mask, and which tokens are masked."""
RAW = "raw"
"""The log-probability mode of an engine that reports them as of temperature 1, before truncation and penalties."""
PROCESSED = "processed"
"""The mode of an engine that reports log-probabilities of the distribution it sampled from."""
UNKNOWN_MODE = "unknown"
"""The mode of an engine that does not tell it."""
LOGPROBS_MODE = "logprobs_mode"
"""The key in a step's `sampling` for the mode of its engine."""
PENALTIES: Mapping[str, float] = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""Parameters that lower the probability of tokens that were already written, with the value that switches them off."""
TRUNCATIONS: Mapping[str, Sequence[float]] = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
"""Parameters that leave out improbable tokens, with the values that switch them off."""
CONSTRAINTS = (
    *("structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "watermarking"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "thinking_token_budget"),
)
"""Fields that, if set, keep the model from tokens that it would have written, or force some."""
ALL_CONSTRAINTS = frozenset(CONSTRAINTS)
MULTIMODAL = "multimodal: the step has images or other data that is not stored"
"""The reason for a submitted step with such data."""
SAMPLING_KINDS: Mapping[str, str] = {
    "greedy": "a temperature below 0.01, or beam search",
    "penalties": "penalties",
    "truncated": "top_p, top_k or min_p",
    "constrained": "a schema, a grammar, a strict or required tool, a bias",
    "raw_logprobs": "a temperature other than 1 at an engine without processed_logprobs",
    "unknown_logprobs": "a temperature other than 1 at an engine that does not tell which log-probabilities it reports",
}
"""The kinds of reasons that are sampling parameters of a call, with these parameters."""
NOTED_STEPS, NOTED_SHARE = 20, 0.1
"""A channel is told of steps that are left out for their sampling if it has so many, and this share is left out."""
FIRST_NOTE = 100
"""Steps after which the log says such a share first; the next time after ten times as many, and so on."""
SMALLEST_TEMPERATURE = 0.01
"""vLLM samples at this one in place of smaller ones, and other engines greedily at the smallest."""
LARGEST_TEMPERATURE = 1e6
"""A larger number is no temperature that an engine samples at."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "reasoning", "thinking")
"""The types of a message's parts that are text. All others are images, sound, video or files."""
TEXT_FIELDS = frozenset(
    (
        *("type", "text", "refusal", "reasoning", "thinking", "closed", "signature"),
        *("annotations", "citations", "logprobs", "cache_control", "prompt_cache_breakpoint"),
    )
)
"""The fields that a part of such a type may have. With other fields, an engine may take it for an image: vLLM does so
if a part has no type, or a uuid beside its type."""


def untrainable_reason(
    sampled: Mapping[str, Any], *, model: str = "", trained_model: str = "", logprobs_mode: str = ""
) -> str | None:
    """Why a response does not represent the policy, as "kind: text"; None if it does.

    `sampled` has the fields of the request, or what was recorded of them. A field that is missing is off. An empty
    name is not known. An empty mode is that of a step whose sender vouches for its log-probabilities.
    """
    return (
        _greedy(sampled)
        or _penalized(sampled)
        or _truncated(sampled)
        or constrained_reason(sampled)
        or _past_end(sampled)
        or _multimodal(sampled)
        or _other_model(model, trained_model)
        or _raw_logprobs(sampled, logprobs_mode)
    )


def is_text_part(part: object) -> bool:
    """Whether an engine reads nothing but text from this part of a message's content."""
    if not isinstance(part, dict):
        return isinstance(part, str)
    return part.get("type") in TEXT_PARTS and not _other_fields(part)


def with_distribution(step: Step, trained_model: str = "") -> Step:
    """A step that was not recorded, with the temperature and the reason that its `sampling` tells."""
    temperature = read_temperature(step.temperature, step.sampling)
    sampled = {**step.sampling, "temperature": temperature}
    mode = str(step.sampling.get(LOGPROBS_MODE, ""))
    reason = untrainable_reason(sampled, model=step.model, trained_model=trained_model, logprobs_mode=mode)
    return replace(step, temperature=temperature, untrainable=step.untrainable or reason)


def read_temperature(own: object, sampling: Mapping[str, Any]) -> float | None:
    """A step's own temperature, else that of its parameters; None if neither is a number."""
    for told in (own, sampling.get("temperature")):
        if isinstance(told, int | float) and not isinstance(told, bool) and abs(told) <= LARGEST_TEMPERATURE:
            return float(told)
    return None


def with_mode(sampling: JsonObject, mode: str) -> JsonObject:
    """An empty mode: nobody has asked the engine."""
    return {**sampling, LOGPROBS_MODE: mode or UNKNOWN_MODE}


def constrained_reason(sampled: Mapping[str, Any]) -> str | None:
    """The constraint that keeps the model from tokens that it would have written, as "constrained: text"; None if there
    is none."""
    if not ALL_CONSTRAINTS.isdisjoint(sampled):
        for name in CONSTRAINTS:
            if sampled.get(name):
                return f"constrained: {name} is set"
    response_format, tool_choice = sampled.get("response_format"), sampled.get("tool_choice")
    if isinstance(response_format, dict) and response_format.get("type") not in (None, "text"):
        return f"constrained: response_format is {str(response_format['type'])[:40]}"
    if tool_choice is not None and tool_choice not in ("auto", "none"):
        return "constrained: tool_choice demands a call"
    if tool_choice == "none" or not sampled.get("tools"):
        return None
    if sampled.get("parallel_tool_calls") is False:
        return "constrained: parallel_tool_calls is false, which allows a single call"
    if strict_functions(sampled["tools"]):
        return "constrained: a tool is strict, so that a grammar forms its calls"
    return None


def strict_functions(tools: object) -> list[dict[str, Any]]:
    """The functions of strict tools. Engines build a grammar for their calls, also under tool_choice auto."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [function for function in functions if isinstance(function, dict) and function.get("strict")]


def sampling_kind(untrainable: str | None) -> str:
    """The kind of a reason if it is sampling parameters; else empty."""
    kind = "" if untrainable is None else fault_kind(untrainable)
    return kind if kind in SAMPLING_KINDS else ""


def sampling_note(channel: str, recent: Mapping[str, int]) -> str | None:
    """A note in words: how many of a channel's last steps are left out for their sampling, and the choices; None if few
    are.

    `recent` counts the steps by `sampling_kind`.
    """
    steps, lost = sum(recent.values()), {kind: recent[kind] for kind in SAMPLING_KINDS if recent.get(kind)}
    if steps < NOTED_STEPS or sum(lost.values()) < NOTED_SHARE * steps:
        return None
    causes = "; ".join(f"{count} {kind}: {SAMPLING_KINDS[kind]}" for kind, count in lost.items())
    return (
        f"{sum(lost.values()) / steps:.0%} of the last {steps:,} steps of channel {channel} are left out of training "
        f"for their sampling ({causes}). Let the agents not ask for it; or set --sampling {channel}=on_policy at the "
        f"gateway ({channel}=all_on_policy for users' sessions too); or train on them with untrainable=True"
    )


class LeftOutLog:
    """Says once for each channel and kind of reason that steps are left out of training, and now and then how many of
    a channel are left out for their sampling."""

    def __init__(self, log: logging.Logger, advice: str = "") -> None:
        self._log = log
        self._advice = advice
        self._said: set[tuple[str, str]] = set()
        self._recent: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Steps since the last note, by channel and `sampling_kind`."""
        self._note_after: defaultdict[str, int] = defaultdict(lambda: FIRST_NOTE)

    def note(self, channel: str, reasons: Sequence[str | None]) -> None:
        """`reasons` has one entry for each step: None if it is trained."""
        for reason in filter(None, reasons):
            cause = channel, fault_kind(reason)
            if cause not in self._said and cause[1] != SIDE_CALL:
                self._said.add(cause)
                text = "channel %s: steps are left out of training, as %s; further ones are only counted%s"
                self._log.warning(text, channel, reason, self._advice)
        recent = self._recent[channel]
        for kind in map(sampling_kind, reasons):
            recent[kind] += 1
        if recent.total() >= self._note_after[channel]:
            if (said := sampling_note(channel, recent)) is not None:
                self._log.warning("%s", said)
            self._note_after[channel] *= 10
            recent.clear()


def _greedy(sampled: Mapping[str, Any]) -> str | None:
    temperature = sampled.get("temperature")
    if temperature == 0:
        return "greedy: temperature is 0"
    if isinstance(temperature, int | float) and 0 < temperature < SMALLEST_TEMPERATURE:
        return (
            f"greedy: temperature {temperature} is below {SMALLEST_TEMPERATURE}, and engines sample at another one in "
            "its place"
        )
    return "greedy: use_beam_search is set" if sampled.get("use_beam_search") else None


def _penalized(sampled: Mapping[str, Any]) -> str | None:
    for name, off in PENALTIES.items():
        if sampled.get(name) not in (None, off):
            return f"penalties: {name} is {sampled[name]}"
    return None


def _truncated(sampled: Mapping[str, Any]) -> str | None:
    for name, off in TRUNCATIONS.items():
        if (value := sampled.get(name)) is not None and value not in off:
            return f"truncated: {name} is {value}"
    return None


def _past_end(sampled: Mapping[str, Any]) -> str | None:
    """No policy is asked for tokens after its end. A broken off answer can be continued all the same."""
    return "constrained: ignore_eos is set, so that it goes on after its end" if sampled.get("ignore_eos") else None


def _multimodal(sampled: Mapping[str, Any]) -> str | None:
    """The step has the placeholder's tokens, not the image."""
    messages = sampled.get("messages")
    if not isinstance(messages, list):
        return None
    for message in messages:
        if type(message) is dict and type(content := message.get("content")) is list:
            for part in content:
                if not is_text_part(part):
                    return f"multimodal: a message has {_part_shown(part)}"
    return None


def _part_shown(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") is None:
        return "a part without a type"
    if (kind := part["type"]) not in TEXT_PARTS:
        return f"a part of type {str(kind)[:40]}"
    return f"a part of type {kind} with the field {_other_fields(part)[0][:40]}, which an engine may read as data"


def _other_fields(part: Mapping[str, Any]) -> list[str]:
    """Fields that a part of text does not have. One that is null is none."""
    return sorted(name for name in part.keys() - TEXT_FIELDS if part[name] is not None)


def _other_model(model: str, trained_model: str) -> str | None:
    if model and trained_model and model != trained_model:
        return f"model: {model[:80]} wrote it, and {trained_model[:80]} is trained"
    return None


def _raw_logprobs(sampled: Mapping[str, Any], mode: str) -> str | None:
    temperature = sampled.get("temperature")
    if temperature in (None, 1):
        return None
    if mode == RAW:
        return f"raw_logprobs: the engine reports log-probabilities of temperature 1, not of {temperature}"
    if mode == UNKNOWN_MODE:
        return (
            "unknown_logprobs: the engine does not tell whether its log-probabilities are those of temperature "
            f"{temperature} or of 1"
        )
    return None
