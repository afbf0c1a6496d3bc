"""A dialect whose URL has the model and says whether the answer is streamed, as Gemini's has. Texts only."""

import json
from collections.abc import Mapping
from typing import Any

from stepwell.gateway.dialects.openai import choose_model, make_call, read_json_object
from stepwell.gateway.error_responses import ErrorDetails

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.chat_form import assistant_message
from stepwell.gateway.dialects.dialect import Dialect, DialectContext, ModelCall, TokenCounter
from stepwell.gateway.dialects.openai_choices import MEDIA_TYPE, ChoicesReply, event
from stepwell.wire.openai import Upstream, Usage

ROOT = "v1beta/models/{model:path}"
WHOLE, STREAMED, COUNTED = f"{ROOT}:generateContent", f"{ROOT}:streamGenerateContent", f"{ROOT}:countTokens"
FINISH = {"stop": "STOP", "length": "MAX_TOKENS"}


def read_contents(raw: bytes, around: DialectContext) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request, and its chat request."""
    asked = read_json_object(raw)
    contents = asked.get("contents")
    if not isinstance(contents, list):
        raise BadRequest("contents must be a list")
    messages = []
    for content in contents:
        text = "\n".join(part["text"] for part in content["parts"])
        is_model = content.get("role") == "model"
        messages.append(assistant_message(text, "", []) if is_model else {"role": "user", "content": text})
    return asked, {"model": around.url.names["model"], "messages": messages}


def candidate(text: str, finish_reason: str | None) -> dict[str, Any]:
    made: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": [{"text": text}]}}
    return made if finish_reason is None else {**made, "finishReason": FINISH.get(finish_reason, "OTHER")}


class ContentStream:
    """Every event is an answer in the form of a whole one."""

    media_type = MEDIA_TYPE

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        shown = [
            candidate(piece["delta"].get("content") or "", piece.get("finish_reason")) for piece in chunk["choices"]
        ]
        return event(json.dumps({"candidates": shown}).encode()) if shown else b""

    def finish(self, usage: Usage) -> bytes:
        return event(json.dumps({"usageMetadata": {"candidatesTokenCount": usage.completion_tokens}}).encode())

    def fail(self, error: bytes) -> bytes:
        return event(error)

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"


class ContentTokenCounter:
    path = COUNTED
    summary = "Count the tokens of contents"
    request_schema: Mapping[str, Any] = {"type": "object"}

    def read(self, raw: bytes, around: DialectContext) -> dict[str, Any]:
        _, request = read_contents(raw, around)
        choose_model(request, around.models)
        return request

    def reply(self, tokens: int) -> bytes:
        return json.dumps({"totalTokens": tokens}).encode()


class ContentDialect(Dialect):
    name = "content"
    paths: tuple[str, ...] = (WHOLE, STREAMED)
    query: Mapping[str, Any] = {"alt": {"enum": ["sse"]}}
    key_header = b"x-goog-api-key"
    summary = "Content"
    description = "A call whose URL has the model."
    unrecorded_description = "The same, unrecorded."
    request_schema: Mapping[str, Any] = {"type": "object", "required": ["contents"]}
    token_counter: TokenCounter | None = ContentTokenCounter()

    def read(self, raw: bytes, around: DialectContext) -> ModelCall:
        asked, request = read_contents(raw, around)
        stream = around.url.path == STREAMED
        if stream and around.url.query.get("alt") != "sse":
            raise BadRequest("a stream needs ?alt=sse")
        wanted = asked.get("generationConfig", {})
        request |= {"stream": stream, "max_tokens": wanted.get("maxOutputTokens", 64)}
        return make_call(self, Upstream.CHAT, request, around, wants_logprobs=False, asked_for={"logprobs": True})

    def reply(self, call: ModelCall, answer: ChoicesReply) -> bytes:
        shown = [candidate(one["message"]["content"], one["finish_reason"]) for one in answer.message["choices"]]
        return json.dumps({"candidates": shown, "modelVersion": call.request["model"]}).encode()

    def stream(self, call: ModelCall) -> ContentStream:
        return ContentStream()

    def error(self, error: ErrorDetails) -> bytes:
        return json.dumps({"error": {"code": error.status, "message": error.message, "status": error.code}}).encode()
