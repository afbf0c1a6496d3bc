"""Reads an engine's answers in OpenAI's form.

A part that is missing or of the wrong type is read as empty. An answer without its main parts is EngineUnavailable.
steps/trainable.py decides whether what was read can be trained on.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import orjson

from stepwell.errors import EngineUnavailable
from stepwell.steps.step import FloatArray, IntArray, VersionSpan


class Upstream(StrEnum):
    """How an engine is asked: the path of a chat or a completions request."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


NO_IDS: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One choice, as the engine reported it."""

    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray | None
    finish_reason: str | None
    version_spans: tuple[VersionSpan, ...] = ()
    """Which weights wrote which tokens; empty if that is not known exactly."""
    stop_string: str | None = None
    """The stop string of the request that ended it; only generations tell it."""
    model: str = ""
    """The name of the model or adapter that wrote it, as the engine reports it; empty if it reports none."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's own token count; None if it gave none."""

    prompt_tokens: int | None
    completion_tokens: int | None


NO_USAGE = Usage(None, None)


def read_object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = _read_leniently(raw, what)
    if not isinstance(value, dict):
        raise EngineUnavailable(f"the engine's {what} is not a JSON object")
    return value


def write_object(value: dict[str, Any], what: str) -> bytes:
    """JSON of an object that was read before. orjson reads deeper nesting than it writes."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as failure:
        raise EngineUnavailable(f"the engine's {what} cannot be passed on: {failure}") from None


def read_choices(reply: dict[str, Any]) -> list[dict[str, Any]]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise EngineUnavailable("the engine's answer has no choices")
    return choices


def read_sampled(reply: Mapping[str, Any], choice: Mapping[str, Any], prompt_ids: IntArray | None = None) -> Sampled:
    """One choice of a chat, completions or generate answer, with ids where vLLM and the gateway write them. Completions
    name the prompt with each choice."""
    if prompt_ids is None:
        prompt_ids = read_ids(choice.get("prompt_token_ids") or reply.get("prompt_token_ids"))
    return Sampled(
        prompt_ids=prompt_ids,
        response_ids=read_ids(choice.get("token_ids")),
        logprobs=read_logprobs(choice.get("logprobs")),
        finish_reason=read_text(choice.get("finish_reason")),
        model=read_text(reply.get("model")) or "",
    )


def read_model(raw: bytes) -> tuple[str, int | None]:
    """The first model of a list of models, and its length limit in tokens if the server tells it."""
    models = read_object(raw, "list of models").get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise EngineUnavailable("the engine lists no model")
    length = models[0].get("max_model_len")
    return str(models[0].get("id", "")), length if isinstance(length, int) else None


def text_ids(sampled: Sampled) -> IntArray:
    """The tokens that make up the text: all but the token that ended the answer."""
    ends_in_token = sampled.finish_reason == "stop" and sampled.stop_string is None
    return sampled.response_ids[:-1] if ends_in_token else sampled.response_ids


def read_usage(reply: dict[str, Any]) -> Usage:
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return NO_USAGE
    return Usage(_read_count(usage.get("prompt_tokens")), _read_count(usage.get("completion_tokens")))


def read_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def read_ids(value: object) -> IntArray:
    """Whole numbers only: numpy would also make ids of 1.5 and "1", and two dimensions of nested lists. It takes twice
    as long, too."""
    if not isinstance(value, list) or not value:
        return NO_IDS
    try:
        return np.frombuffer(struct.pack(f"{len(value)}i", *value), np.int32)
    except struct.error:
        return NO_IDS


def read_logprobs(value: object) -> FloatArray | None:
    """Reads chat's and generate's {content: [{logprob}]}, or completions' {token_logprobs: []}."""
    if not isinstance(value, dict):
        return None
    content, flat = value.get("content"), value.get("token_logprobs")
    try:
        if isinstance(content, list):
            flat = [entry["logprob"] for entry in content]
        return read_floats(flat) if isinstance(flat, list) else None
    except (TypeError, KeyError):
        return None


def read_logprob_list(value: object) -> list[Any]:
    """Reads as read_logprobs does, for a piece of a streamed answer; an entry without a log-probability counts as
    null."""
    if not isinstance(value, dict):
        return []
    content = value.get("content")
    if isinstance(content, list):
        try:
            return [entry["logprob"] for entry in content]
        except (TypeError, KeyError):
            return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    flat = value.get("token_logprobs")
    return flat if isinstance(flat, list) else []


def read_floats(values: list[Any]) -> FloatArray | None:
    """A null becomes NaN. None if a value is not a number, or too large for a float."""
    if not values:
        return np.empty(0, np.float32)
    try:
        return np.frombuffer(struct.pack(f"{len(values)}f", *values), np.float32)
    except (struct.error, OverflowError):
        return read_floats([math.nan if value is None else value for value in values]) if None in values else None


def _read_count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _read_leniently(raw: bytes, what: str) -> Any:
    """Some engines write NaN, which is read as null, and half characters, which are read as U+FFFD."""
    try:
        return orjson.loads(orjson.dumps(json.loads(raw.decode(errors="replace"))))
    except (ValueError, TypeError, RecursionError) as failure:
        raise EngineUnavailable(f"the engine's {what} is not JSON: {failure}") from None
