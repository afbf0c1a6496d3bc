"""Anthropic's Messages API.

A request becomes a chat request (chat_request.py), so that ids, log-probabilities and versions are recorded
as for chat. Fields that are not known are ignored; content blocks and tools that are not known are refused.

- `thinking` decides only whether thoughts are shown: they are, unless its type is "disabled". Whether the model thinks
  is a matter of its chat template.
- Ids of tool calls and the signatures of thoughts prove which step a client continues.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from stepwell.gateway.dialects.dialect import Dialect, DialectContext, ModelCall, TokenCounter
from stepwell.gateway.dialects.messages_dialect import MessageStreamWriter, write_message
from stepwell.gateway.dialects.messages_request import translate_request
from stepwell.gateway.dialects.openai import (
    FLAG,
    INTEGER,
    OBJECT,
    TEXT,
    choose_model,
    make_call,
    read_json_object,
)
from stepwell.gateway.dialects.openai_choices import ChoicesReply
from stepwell.gateway.error_responses import CONTEXT_OVERFLOW, ErrorDetails
from stepwell.wire.openai import Upstream

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The types of errors by status. Others below 500 are invalid_request_error, others above it api_error."""
TOO_LONG = "prompt is too long: "
"""How Anthropic's error for this begins. Claude Code compacts its history when it reads it."""
RENDERED = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message")
"""The fields of a chat request that its prompt is made of."""

BLOCKS: dict[str, Any] = {"anyOf": [TEXT, {"type": "array", "items": OBJECT}]}
PROMPT_FIELDS: dict[str, Any] = {
    "model": TEXT,
    "system": BLOCKS,
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": BLOCKS},
        },
    },
    "tools": {"type": "array", "items": {"type": "object", "required": ["name", "input_schema"]}},
    "tool_choice": OBJECT,
    "thinking": OBJECT,
}
REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        **PROMPT_FIELDS,
        "max_tokens": {"type": "integer", "minimum": 1},
        "stream": FLAG,
        "stop_sequences": {"type": "array", "items": TEXT},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": INTEGER,
        "output_config": OBJECT,
        "metadata": OBJECT,
    },
}


class MessagesTokenCounter:
    path = "messages/count_tokens"
    summary = "Count the tokens of a message's prompt"
    request_schema: Mapping[str, Any] = {
        "type": "object",
        "required": ["model", "messages"],
        "properties": PROMPT_FIELDS,
    }

    def read(self, raw: bytes, around: DialectContext) -> dict[str, Any]:
        translated = translate_request(read_json_object(raw), around.seal).request
        request = {name: translated[name] for name in RENDERED if name in translated}
        choose_model(request, around.models)
        return request

    def reply(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


class MessagesDialect(Dialect):
    name = "messages"
    paths: tuple[str, ...] = ("messages",)
    key_header = b"x-api-key"
    summary = "Message"
    description = "Anthropic's call; it becomes a step. Unknown fields are ignored, unknown blocks and tools refused."
    unrecorded_description = "Anthropic's call, unrecorded, for those who need only the message: it has no token ids."
    request_schema: Mapping[str, Any] = REQUEST_SCHEMA
    token_counter: TokenCounter | None = MessagesTokenCounter()

    def read(self, raw: bytes, around: DialectContext) -> ModelCall:
        translated = translate_request(read_json_object(raw), around.seal)
        call = make_call(
            self,
            Upstream.CHAT,
            translated.request,
            around,
            wants_logprobs=False,
            asked_for={"logprobs": True},
            texts=translated.texts,
            malformed_history=translated.malformed_history,
            echoed=translated.echoed,
        )
        # the answer is written anew in any case, so there is no need to hide the ids in the engine's
        return call._replace(context=around.seal.seal(call.uid), wants=call.wants._replace(ids=True))

    def reply(self, call: ModelCall, answer: ChoicesReply) -> bytes:
        return write_message(call, answer)

    def stream(self, call: ModelCall) -> MessageStreamWriter:
        return MessageStreamWriter(call)

    def error(self, error: ErrorDetails) -> bytes:
        return anthropic_error(error)


def anthropic_error(error: ErrorDetails) -> bytes:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = TOO_LONG + error.message if error.code == CONTEXT_OVERFLOW else error.message
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": None})
