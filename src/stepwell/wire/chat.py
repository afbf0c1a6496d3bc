"""Chat completions: what the agent sends, what the engine is sent, and what each gets back.

The engine is asked for token ids and log-probabilities on every call; the agent gets only what it asked for itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from stepwell.core.step import JsonObject
from stepwell.errors import BadRequest
from stepwell.wire.reading import Sampled, Usage, read_choices, read_object, read_sampled, read_usage

SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format", "tool_choice"),
)
ENGINE_CONTROL_FIELDS = ("kv_transfer_params", "vllm_xargs", "chat_template", "cache_salt")
"""Fields of vLLM's by which a client could reach past its own request."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request, ready to be forwarded."""

    body: bytes
    sampling: JsonObject
    wants_logprobs: bool
    wants_ids: bool


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer, split into what the agent gets and what is recorded."""

    body: bytes
    choices: tuple[Sampled, ...]
    usage: Usage


def read_call(raw: bytes, *, response_length: int) -> ChatCall:
    request = _read_request(raw)
    if request.get("stream"):
        raise BadRequest("streaming is not supported yet; send the request without stream=true")
    wants_logprobs, wants_ids = bool(request.get("logprobs")), bool(request.get("return_token_ids"))
    for name in ENGINE_CONTROL_FIELDS:
        request.pop(name, None)
    request["max_tokens"] = _max_tokens(request, response_length)
    request["logprobs"] = request["return_token_ids"] = True
    sampling = {name: request[name] for name in SAMPLING_FIELDS if name in request}
    return ChatCall(orjson.dumps(request), sampling, wants_logprobs, wants_ids)


def read_reply(raw: bytes, call: ChatCall) -> ChatReply:
    reply = read_object(raw, "chat completion")
    choices = read_choices(reply)
    sampled = tuple(read_sampled(reply, choice) for choice in choices)
    if not call.wants_ids:
        for part in (reply, *choices):
            part.pop("prompt_token_ids", None)
            part.pop("token_ids", None)
    if not call.wants_logprobs:
        for choice in choices:
            choice["logprobs"] = None
    return ChatReply(orjson.dumps(reply), sampled, read_usage(reply))


def _read_request(raw: bytes) -> dict[str, Any]:
    try:
        request = orjson.loads(raw)
    except orjson.JSONDecodeError as failure:
        raise BadRequest(f"the request body is not JSON: {failure}") from None
    if not isinstance(request, dict):
        raise BadRequest("the request body must be a JSON object")
    if not isinstance(request.get("messages"), list) or not request["messages"]:
        raise BadRequest("messages must be a list of at least one message")
    return request


def _max_tokens(request: Mapping[str, Any], response_length: int) -> int:
    """No more than a trainer will take. max_completion_tokens is OpenAI's newer name and wins, as it does in vLLM."""
    for name in ("max_completion_tokens", "max_tokens"):
        asked = request.get(name)
        if asked is not None:
            if not isinstance(asked, int) or asked < 1:
                raise BadRequest(f"{name} must be a whole number of at least 1, not {asked!r}")
            return min(asked, response_length)
    return response_length
