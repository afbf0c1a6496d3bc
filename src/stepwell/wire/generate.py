"""Tokens in, tokens out, for white-box agents: vLLM's generate endpoint, or completions where that is closed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from stepwell.core.step import IntArray, JsonObject, VersionSpan, ids_array
from stepwell.wire.reading import Sampled, Usage, read_choices, read_object, read_sampled, read_usage


@dataclass(frozen=True, slots=True)
class Generated:
    sampled: Sampled
    usage: Usage
    version_spans: tuple[VersionSpan, ...]
    """Which weights wrote which tokens; empty where the engine does not say, or not in numbers."""


def generate_body(prompt_ids: Sequence[int], sampling: JsonObject) -> bytes:
    return orjson.dumps({"token_ids": prompt_ids, "sampling_params": {**sampling, "logprobs": 0}})


def completions_body(model: str, prompt_ids: Sequence[int], sampling: JsonObject) -> bytes:
    return orjson.dumps({**sampling, "model": model, "prompt": prompt_ids, "logprobs": 0, "return_token_ids": True})


def read_generated(raw: bytes, prompt_ids: Sequence[int]) -> Generated:
    reply = read_object(raw, "generation")
    choice = read_choices(reply)[0]
    prompt: IntArray = ids_array(prompt_ids)
    return Generated(read_sampled(reply, choice, prompt), read_usage(reply), _spans(choice.get("weight_versions")))


def read_model_name(raw: bytes) -> str:
    models = read_object(raw, "list of models").get("data") or [{}]
    return str(models[0].get("id", ""))


def _spans(value: Any) -> tuple[VersionSpan, ...]:
    try:
        return tuple(VersionSpan(int(span["version"]), span["start"], span["end"]) for span in value or ())
    except (ValueError, TypeError, KeyError):
        return ()
