"""Tokens in, tokens out, for white-box agents: vLLM's generate endpoint, or completions where that is closed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import IntArray, JsonObject, VersionSpan, ids_array
from stepwell.wire.openai import Sampled, Usage, read_choices, read_object, read_sampled, read_text, read_usage

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Generated:
    sampled: Sampled
    usage: Usage
    version_spans: tuple[VersionSpan, ...]
    """Which weights wrote which tokens; empty where the engine does not say, or not in numbers."""


def generate_body(prompt_ids: Sequence[int], sampling: JsonObject) -> bytes:
    return _dumped({"token_ids": prompt_ids, "sampling_params": {**sampling, "logprobs": 0}})


def completions_body(model: str, prompt_ids: Sequence[int], sampling: JsonObject) -> bytes:
    ours = {"model": model, "prompt": prompt_ids, "logprobs": 0, "return_token_ids": True, "stream": False}
    return _dumped({**sampling, **ours})


def read_generated(raw: bytes, prompt_ids: Sequence[int], model: str = "") -> Generated:
    """`model` is the model that the engine serves; it counts if the answer names none."""
    reply = read_object(raw, "generation")
    choice = read_choices(reply)[0]
    prompt: IntArray = ids_array(prompt_ids)
    sampled = read_sampled(reply, choice, prompt)
    sampled = replace(sampled, stop_string=read_text(choice.get("stop_reason")), model=sampled.model or model)
    return Generated(sampled, read_usage(reply), _spans(choice.get("weight_versions")))


def read_model(raw: bytes) -> tuple[str, int | None]:
    """The first model of a list of models, and how many tokens it holds, where the server says so."""
    models = read_object(raw, "list of models").get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise EngineUnavailable("the engine lists no model")
    length = models[0].get("max_model_len")
    return str(models[0].get("id", "")), length if isinstance(length, int) else None


def _dumped(body: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as failure:  # an integer beyond 64 bits, say
        raise BadRequest(f"sampling_params cannot be sent to an engine: {failure}") from None


def _spans(value: Any) -> tuple[VersionSpan, ...]:
    try:
        return tuple(VersionSpan(int(span["version"]), span["start"], span["end"]) for span in value or ())
    except (ValueError, TypeError, KeyError):
        return ()
