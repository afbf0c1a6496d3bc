"""OpenAI's completions."""

from collections.abc import Mapping
from typing import Any

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from stepwell.gateway.dialects.openai import COMMON_FIELDS, TEXT, OpenAIAnswers, make_call, read_json_object
from stepwell.wire.openai import Upstream

IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        "prompt": {"anyOf": [TEXT, IDS, {"type": "array", "minItems": 1, "items": TEXT}]},
        "logprobs": {"type": "integer", "minimum": 0},
        **COMMON_FIELDS,
    },
}


class CompletionsDialect(OpenAIAnswers):
    name = "completions"
    paths: tuple[str, ...] = ("completions",)
    summary = "Completion"
    description = "OpenAI's call; every choice becomes a step. Several prompts may be sent."
    unrecorded_description = "The same for text and token ids."
    request_schema: Mapping[str, Any] = REQUEST_SCHEMA

    def read(self, raw: bytes, around: DialectContext) -> ModelCall:
        request = read_json_object(raw)
        prompt, logprobs = request.get("prompt"), request.get("logprobs")
        if not isinstance(prompt, (str, list)) or not prompt:
            raise BadRequest("prompt must be a text, a list of token ids, or a list of such prompts")
        if request.get("echo"):
            raise BadRequest("echo is not supported: the prompt's tokens would be taken for sampled ones")
        # `logprobs` is a number of alternatives: 0 asks for the sampled token's own
        wants_logprobs = logprobs is not None and logprobs is not False
        asked_for = {} if wants_logprobs else {"logprobs": 0}
        return make_call(
            self, Upstream.COMPLETIONS, request, around, wants_logprobs=wants_logprobs, asked_for=asked_for
        )
