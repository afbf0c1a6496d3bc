"""The response object: the request's settings, the status, the output and the token count."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from stepwell.gateway.dialects.responses_output import ItemStatus, OutputContext
from stepwell.wire.openai import Usage

CUT_OFF = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is incomplete, by the engine's finish_reason."""


class ResponseContext(NamedTuple):
    """The context of a response: that of its output items, and the settings that it repeats."""

    output: OutputContext
    settings: bytes
    """JSON of the fields of the request that the response repeats, without its opening brace."""

    @property
    def id(self) -> str:
        return self.output.attach_seal("resp")


def settings_of(request: Mapping[str, Any], chat: Mapping[str, Any], *, is_stored: bool) -> dict[str, Any]:
    """The request's settings that a response repeats. `chat` is the request in force."""
    reasoning, text = request.get("reasoning") or {}, request.get("text") or {}
    return {
        "background": False,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "max_tool_calls": request.get("max_tool_calls"),
        "metadata": request.get("metadata") or {},
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "previous_response_id": request.get("previous_response_id"),
        "prompt_cache_key": request.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": request.get("safety_identifier"),
        "service_tier": "default",
        "store": is_stored,
        "temperature": chat["temperature"],
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_logprobs": 0,
        "top_p": chat["top_p"],
        "truncation": "disabled",
        "user": request.get("user"),
    }


class ResponseObject:
    """Writes the response object in each of its states."""

    def __init__(self, context: ResponseContext, model: str) -> None:
        self._head = {"id": context.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._settings = context.settings

    def whole(
        self,
        finish_reason: str | None,
        output: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any],
        sampled: Mapping[str, Any] | None,
    ) -> bytes:
        """An answer that is not streamed. `sampled` is added if it is given."""
        response = self.ended(finish_reason, [orjson.dumps(item) for item in output], usage)
        return response if sampled is None else response[:-1] + b',"sampled":' + orjson.dumps(sampled) + b"}"

    def begun(self) -> bytes:
        return self._write("in_progress", b"[]")

    def ended(self, finish_reason: str | None, output: Sequence[bytes], usage: Mapping[str, Any]) -> bytes:
        reason = CUT_OFF.get(finish_reason or "")
        items = b"[" + b",".join(output) + b"]"
        details = {"reason": reason} if reason else None
        return self._write("incomplete" if reason else "completed", items, details=details, usage=usage)

    def failed(self, message: str, output: Sequence[bytes]) -> bytes:
        error = {"code": "server_error", "message": message}
        return self._write("failed", b"[" + b",".join(output) + b"]", error=error)

    def _write(
        self,
        status: str,
        output: bytes,
        *,
        error: Mapping[str, str] | None = None,
        details: Mapping[str, str] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        state = {**self._head, "status": status, "error": error, "incomplete_details": details, "usage": usage}
        return orjson.dumps(state)[:-1] + b',"output":' + output + b"," + self._settings


def item_status(finish_reason: str | None) -> ItemStatus:
    """The status of an answer's last item."""
    return "incomplete" if finish_reason in CUT_OFF else "completed"


def response_usage(counted: object, usage: Usage) -> dict[str, Any]:
    """The token count of the engine's usage object; `usage` counts if there is none."""
    given: Mapping[str, Any] = counted if isinstance(counted, dict) else {}
    prompt = _count(given.get("prompt_tokens", usage.prompt_tokens))
    completion = _count(given.get("completion_tokens", usage.completion_tokens))
    details = given.get("prompt_tokens_details"), given.get("completion_tokens_details")
    read, written = (part if isinstance(part, dict) else {} for part in details)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": _count(read.get("cached_tokens")), "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": _count(written.get("reasoning_tokens"))},
        "total_tokens": prompt + completion,
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
