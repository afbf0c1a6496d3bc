"""What an agent asks for, and what the engine is asked for: the same, and every token id with its log-probability.

Unknown fields pass. Those by which a client could reach past its own request do not.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from stepwell.engines import PRIVATE_FIELDS
from stepwell.errors import BadRequest
from stepwell.gateway.dialects.chat import mend_messages
from stepwell.gateway.dialects.sampling import make_explicit, recorded_sampling, why_untrainable
from stepwell.gateway.dialects.side_calls import side_call
from stepwell.steps.step import JsonObject
from stepwell.wire.openai import Upstream

NOT_FORWARDED = (*PRIVATE_FIELDS, "return_token_ids", "include_reasoning")
"""The last two are the agent's wishes to the gateway; engine kinds ask for ids and reasoning in their own way."""
MOST_CHOICES = 128


class Kind(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def upstream(self) -> Upstream:
        return UPSTREAMS[self]


UPSTREAMS = {Kind.CHAT: Upstream.CHAT, Kind.COMPLETIONS: Upstream.COMPLETIONS}


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """A request, ready to be forwarded."""

    kind: Kind
    request: dict[str, Any]
    """Every sampling parameter is explicit; the engine kind adds and drops what its engines need."""
    sampling: JsonObject
    untrainable: str | None
    """Why its reply will not be trained, as far as the request tells."""
    stream: bool
    choices_per_prompt: int
    wants_logprobs: bool
    wants_ids: bool
    wants_usage: bool
    """The count at a stream's end."""
    wants_reasoning: bool
    malformed_history: int
    """Tool calls in the history whose arguments were no JSON object."""


def read_call(kind: Kind, raw: bytes, *, response_length: int, marked: str | None = None) -> ModelCall:
    """`marked` is what the agent's owner says of the call: task or side."""
    request = _read_object(raw)
    malformed = 0
    if kind is Kind.CHAT:
        malformed = mend_messages(request.get("messages"))
    else:
        _check_prompt(request)
    choices, stream = _choices(request), _flag(request, "stream")
    wants_logprobs, wants_ids = _wants_logprobs(kind, request), _flag(request, "return_token_ids")
    wants_reasoning = request.get("include_reasoning") is not False
    for name in NOT_FORWARDED:
        request.pop(name, None)
    make_explicit(request, response_length)
    if kind is Kind.CHAT:
        request["logprobs"] = True
    elif not wants_logprobs:
        request["logprobs"] = 0
    side = side_call(request, marked)
    return ModelCall(
        kind=kind,
        request=request,
        sampling=recorded_sampling(request),
        untrainable=f"side_call: {side}" if side else why_untrainable(request),
        stream=stream,
        choices_per_prompt=choices,
        wants_logprobs=wants_logprobs,
        wants_ids=wants_ids,
        wants_usage=stream and _ask_for_usage(request),
        wants_reasoning=wants_reasoning,
        malformed_history=malformed,
    )


def _read_object(raw: bytes) -> dict[str, Any]:
    try:
        request = orjson.loads(raw)
    except orjson.JSONDecodeError as failure:
        raise BadRequest(f"the request body is not JSON: {failure}") from None
    if not isinstance(request, dict):
        raise BadRequest("the request body must be a JSON object")
    return request


def _check_prompt(request: dict[str, Any]) -> None:
    prompt = request.get("prompt")
    if not isinstance(prompt, (str, list)) or not prompt:
        raise BadRequest("prompt must be a text, a list of token ids, or a list of such prompts")
    if request.get("echo"):
        raise BadRequest("echo is not supported: the prompt's tokens would be taken for sampled ones")


def _choices(request: dict[str, Any]) -> int:
    n = request.get("n")
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_CHOICES:
        raise BadRequest(f"n must be a whole number from 1 to {MOST_CHOICES}")
    return n


def _flag(request: dict[str, Any], name: str) -> bool:
    value = request.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return bool(value)


def _wants_logprobs(kind: Kind, request: dict[str, Any]) -> bool:
    """Completions ask with a number, of alternatives: 0 asks for the sampled token's own."""
    if kind is Kind.CHAT:
        return _flag(request, "logprobs")
    return request.get("logprobs") is not None and request["logprobs"] is not False


def _ask_for_usage(request: dict[str, Any]) -> bool:
    """Ask for the count at the stream's end; gives whether the agent had asked for it itself."""
    options = request.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object")
    request["stream_options"] = {**(options or {}), "include_usage": True}
    return bool(options and options.get("include_usage"))
