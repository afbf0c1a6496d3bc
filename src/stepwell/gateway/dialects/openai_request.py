"""The common part of chat and completions: how a request is read and forwarded, its JSON schema, and the answers.

Which of its fields are forwarded is said in request_fields.py.
"""

from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

import orjson

from stepwell.common.user_input import check_containers
from stepwell.engines.engine import DEFAULT_MODEL
from stepwell.errors import BadRequest, ModelNotFound
from stepwell.gateway.dialects.dialect import NO_TEXTS, Dialect, DialectContext, ModelCall, PromptTexts
from stepwell.gateway.dialects.openai_choices import ChoicesReply, ChoicesStreamWriter, Wants, write_reply
from stepwell.gateway.dialects.request_rules import make_explicit, recorded_sampling
from stepwell.gateway.error_responses import ErrorDetails, openai_error
from stepwell.wire.openai import Upstream

MOST_CHOICES = 128

INTEGER: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object"}
FLAG: dict[str, Any] = {"type": "boolean"}
COMMON_FIELDS: dict[str, Any] = {
    "model": TEXT,
    "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    "n": {"type": "integer", "minimum": 1, "maximum": MOST_CHOICES},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": INTEGER,
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "seed": INTEGER,
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "return_token_ids": {"type": "boolean", "description": "Show the token ids that are recorded."},
}
"""The JSON schema of the fields that both requests have."""


class OpenAIAnswers(Dialect):
    """The half of a dialect that answers in the engine's own form."""

    def reply(self, call: ModelCall, answer: ChoicesReply) -> bytes:
        return write_reply(answer, call.wants)

    def stream(self, call: ModelCall) -> ChoicesStreamWriter:
        return ChoicesStreamWriter(call.wants)

    def error(self, error: ErrorDetails) -> bytes:
        return openai_error(error)


def read_json_object(raw: bytes) -> dict[str, Any]:
    check_containers(raw)
    try:
        request = orjson.loads(raw)
    except orjson.JSONDecodeError as failure:
        raise BadRequest(f"the request body is not JSON: {failure}") from None
    if not isinstance(request, dict):
        raise BadRequest("the request body must be a JSON object")
    return request


def write_json(value: object, what: str) -> bytes:
    """JSON of a part of a request. orjson reads deeper nesting than it writes."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as failure:
        raise BadRequest(f"{what} cannot be read: {failure}") from None


def read_flag(request: dict[str, Any], name: str) -> bool:
    value = request.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return bool(value)


def make_call(
    dialect: Dialect,
    upstream: Upstream,
    request: dict[str, Any],
    around: DialectContext,
    *,
    wants_logprobs: bool,
    asked_for: Mapping[str, Any],
    texts: PromptTexts = NO_TEXTS,
    malformed_history: int = 0,
    echoed: tuple[str, ...] = (),
) -> ModelCall:
    """Change a request in place to what the engine is asked: everything explicit, and `asked_for` in any case."""
    choices, stream = _read_choices(request), read_flag(request, "stream")
    wants_ids = read_flag(request, "return_token_ids")
    wants_reasoning = request.get("include_reasoning") is not False
    removed = around.rules.apply(request, upstream)
    make_explicit(request, around.response_length)
    choose_model(request, around.models)
    replaced = around.sampling.apply(request)
    request |= asked_for
    wants_usage = stream and _ask_for_usage(request)
    return ModelCall(
        dialect=dialect,
        upstream=upstream,
        request=request,
        sampling=recorded_sampling(request, replaced),
        stream=stream,
        choices_per_prompt=choices,
        wants=Wants(wants_ids, wants_logprobs, wants_usage, wants_reasoning),
        texts=texts,
        malformed_history=malformed_history,
        uid=token_hex(16),
        echoed=echoed,
        removed=removed,
        replaced=replaced,
    )


def choose_model(request: dict[str, Any], models: Sequence[str]) -> None:
    """The first of `models` unless the request names another of them."""
    if models and request.get("model") in (None, DEFAULT_MODEL):
        request["model"] = models[0]
    elif models and request["model"] not in models:
        asked, served = str(request["model"])[:80], f"{', '.join(models)} (`{DEFAULT_MODEL}` is {models[0]})"
        raise ModelNotFound(f"the model `{asked}` does not exist here; this gateway serves {served}")


def _read_choices(request: dict[str, Any]) -> int:
    n = request.get("n")
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_CHOICES:
        raise BadRequest(f"n must be a whole number from 1 to {MOST_CHOICES}")
    return n


def _ask_for_usage(request: dict[str, Any]) -> bool:
    """Ask for the token count at the end of the stream. Returns whether the agent itself asked for it."""
    options = request.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object")
    request["stream_options"] = {**(options or {}), "include_usage": True}
    return bool(options and options.get("include_usage"))
