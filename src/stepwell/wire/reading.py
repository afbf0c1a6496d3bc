"""Reading an engine's answers, whatever is wrong with them: a missing part is empty, never an exception.

Whether what was read is fit for training is not decided here but in core/soundness.py.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from stepwell.core.step import FloatArray, IntArray
from stepwell.errors import EngineUnavailable

NO_IDS: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One choice, as the engine reported it."""

    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's own count; None where it gave none."""

    prompt_tokens: int | None
    completion_tokens: int | None


def read_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object, NaN and all (which orjson refuses and some engines write)."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(raw)
        except ValueError as failure:
            raise EngineUnavailable(f"the engine's {what} is not JSON: {failure}") from None
    if not isinstance(value, dict):
        raise EngineUnavailable(f"the engine's {what} is not a JSON object")
    return value


def read_choices(reply: dict[str, Any]) -> list[dict[str, Any]]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise EngineUnavailable("the engine's answer has no choices")
    return choices


def read_sampled(reply: dict[str, Any], choice: dict[str, Any], prompt_ids: IntArray | None = None) -> Sampled:
    """One choice of a chat, completions or generate answer."""
    return Sampled(
        prompt_ids=read_ids(reply.get("prompt_token_ids")) if prompt_ids is None else prompt_ids,
        response_ids=read_ids(choice.get("token_ids")),
        logprobs=read_logprobs(choice.get("logprobs")),
        finish_reason=choice.get("finish_reason"),
    )


def read_usage(reply: dict[str, Any]) -> Usage:
    usage = reply.get("usage") or {}
    return Usage(usage.get("prompt_tokens"), usage.get("completion_tokens"))


def read_ids(value: object) -> IntArray:
    try:
        return np.array(value, np.int32) if isinstance(value, list) else NO_IDS
    except (ValueError, TypeError, OverflowError):
        return NO_IDS


def read_logprobs(value: object) -> FloatArray | None:
    """From chat's and generate's {content: [{logprob}]}, or completions' {token_logprobs: []}; a null becomes NaN."""
    if not isinstance(value, dict):
        return None
    content, flat = value.get("content"), value.get("token_logprobs")
    try:
        if isinstance(content, list):
            flat = [entry["logprob"] for entry in content]
        return np.array(flat, np.float32) if isinstance(flat, list) else None
    except (ValueError, TypeError, KeyError):
        return None
