"""OpenAI's chat completions."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall, PromptTexts
from stepwell.gateway.dialects.openai import (
    COMMON_FIELDS,
    FLAG,
    OBJECT,
    TEXT,
    OpenAIAnswers,
    make_call,
    read_flag,
    read_json_object,
)
from stepwell.gateway.dialects.openai_choices import copy_reasoning
from stepwell.wire.openai import Upstream

LAST_MESSAGES = 16
"""Messages from the end that are searched for the user's last one: a side call may use a tool or two itself."""
TEXT_READ = 2_000
"""Characters of a message that are read for PromptTexts, so that a long prompt costs no more than a short one."""

MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT, {"type": "array", "items": OBJECT}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": OBJECT},
        "tool_call_id": TEXT,
        "reasoning": TEXT,
        "reasoning_content": TEXT,
    },
}
REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
        "tools": {"type": "array", "items": OBJECT},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
        "parallel_tool_calls": FLAG,
        "response_format": OBJECT,
        "logprobs": FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        **COMMON_FIELDS,
    },
}


class ChatDialect(OpenAIAnswers):
    name = "chat"
    paths: tuple[str, ...] = ("chat/completions",)
    summary = "Chat completion"
    description = "OpenAI's call; every choice becomes a step. Unknown fields are removed."
    unrecorded_description = (
        "OpenAI's call, unrecorded, for those who keep their tokens themselves: a whole answer has all ids and\n"
        "log-probabilities, and with each choice its policy_version, version_spans and exactness."
    )
    request_schema: Mapping[str, Any] = REQUEST_SCHEMA

    def read(self, raw: bytes, around: DialectContext) -> ModelCall:
        request = read_json_object(raw)
        malformed = repair_messages(request.get("messages"))
        if around.rules.calls_as_text and request.get("tools") and request.get("tool_choice") in (None, "auto"):
            request["tool_choice"] = "none"  # vLLM renders the tools all the same
        return make_call(
            self,
            Upstream.CHAT,
            request,
            around,
            wants_logprobs=read_flag(request, "logprobs"),
            asked_for={"logprobs": True},
            texts=prompt_texts(request["messages"]),
            malformed_history=malformed,
        )


def repair_messages(messages: object) -> int:
    """Change the history in place so that an engine accepts it. Returns how many tool calls were malformed.

    If a model once wrote arguments that are not a JSON object, they stay in the history, and an engine that parses the
    history would refuse every further call. Such arguments are forwarded as an object that holds the text. A
    message's reasoning is forwarded under both of its names.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    malformed = 0
    for message in messages:
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise BadRequest("every message must be an object with a role")
        if role == "assistant":
            if "reasoning" in message or "reasoning_content" in message:
                copy_reasoning(message)
            if calls := message.get("tool_calls"):
                malformed += _repair_calls(calls)
    return malformed


def _repair_calls(calls: object) -> int:
    if not isinstance(calls, list):
        raise BadRequest("a message's tool_calls must be a list")
    return sum(map(_repair_call, calls))


def _repair_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return False
    if arguments == "" or is_json_object(arguments):
        return False
    function["arguments"] = orjson.dumps({"malformed": arguments}).decode()
    return True


def is_json_object(text: str) -> bool:
    """Whether the engines' own parser reads an object: it takes NaN and Infinity, but no lone surrogate."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        pass
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
        return isinstance(value, dict)
    except (ValueError, RecursionError):
        return False


def prompt_texts(messages: list[Any]) -> PromptTexts:
    system = _beginning(messages[0]) if messages[0]["role"] in ("system", "developer") else ""
    for message in messages[: -LAST_MESSAGES - 1 : -1]:
        if message["role"] == "user" and (user := _beginning(message)):
            return PromptTexts(system, user)
    return PromptTexts(system)


def _beginning(message: dict[str, Any]) -> str:
    """The beginning of a message's text; empty if it has none."""
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        content = "\n".join(text[:TEXT_READ] for text in texts if isinstance(text, str))
    return content[:TEXT_READ].lstrip() if isinstance(content, str) else ""
