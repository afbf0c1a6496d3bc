"""OpenAI's chat completions and completions, and what dialects that translate to them share: how a request is read and
forwarded, and its JSON schema.

Which of its fields are forwarded is said in request_rules.py.
"""

import json
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

import orjson

from stepwell.common.user_input import check_containers
from stepwell.engines.engine import DEFAULT_MODEL
from stepwell.errors import BadRequest, ModelNotFound
from stepwell.gateway.dialects.dialect import NO_TEXTS, Dialect, DialectContext, ModelCall, PromptTexts
from stepwell.gateway.dialects.openai_choices import (
    ChoicesReply,
    ChoicesStreamWriter,
    Wants,
    copy_reasoning,
    write_reply,
)
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
CHAT_SCHEMA: dict[str, Any] = {
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
IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
COMPLETION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        "prompt": {"anyOf": [TEXT, IDS, {"type": "array", "minItems": 1, "items": TEXT}]},
        "logprobs": {"type": "integer", "minimum": 0},
        **COMMON_FIELDS,
    },
}


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


class ChatDialect(OpenAIAnswers):
    name = "chat"
    paths: tuple[str, ...] = ("chat/completions",)
    summary = "Chat completion"
    description = "OpenAI's call; every choice becomes a step. Unknown fields are removed."
    unrecorded_description = (
        "OpenAI's call, unrecorded, for those who keep their tokens themselves: a whole answer has all ids and\n"
        "log-probabilities, and with each choice its policy_version, version_spans and exactness."
    )
    request_schema: Mapping[str, Any] = CHAT_SCHEMA

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
                if not isinstance(calls, list):
                    raise BadRequest("a message's tool_calls must be a list")
                malformed += sum(map(_repair_call, calls))
    return malformed


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


class CompletionsDialect(OpenAIAnswers):
    name = "completions"
    paths: tuple[str, ...] = ("completions",)
    summary = "Completion"
    description = "OpenAI's call; every choice becomes a step. Several prompts may be sent."
    unrecorded_description = "The same for text and token ids."
    request_schema: Mapping[str, Any] = COMPLETION_SCHEMA

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
