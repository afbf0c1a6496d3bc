"""The gateway's OpenAPI document, completed by the agents' calls, which FastAPI does not serve and cannot list."""

from typing import Any

import orjson

BELOW = "/{trajectory_uid}/{prompt_uid}/v1"
NUMBER: dict[str, Any] = {"type": "number"}
WHOLE: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object"}
FLAG: dict[str, Any] = {"type": "boolean"}

COMMON: dict[str, Any] = {
    "model": TEXT,
    "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": WHOLE,
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "seed": WHOLE,
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "return_token_ids": {"type": "boolean", "description": "Show the token ids that are recorded."},
}
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
CHAT: dict[str, Any] = {
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
        **COMMON,
    },
}
IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
COMPLETIONS: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        "prompt": {"anyOf": [TEXT, IDS, {"type": "array", "minItems": 1, "items": TEXT}]},
        "logprobs": {"type": "integer", "minimum": 0},
        **COMMON,
    },
}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {"message": TEXT, "type": TEXT, "param": {}, "code": {}},
        }
    },
}
MARKS = {
    "Idempotency-Key": "Calls of one trajectory that carry the same key are one call, and one step.",
    "x-stepwell-call": "task or side: whether this call belongs to the task; without it, known side calls are found.",
}


def documented(schema: dict[str, Any]) -> bytes:
    """FastAPI's own document, with the agents' calls, keys and errors."""
    paths = dict(schema["paths"])
    paths[f"{BELOW}/chat/completions"] = {"post": _operation("Chat completion", "Unknown fields are passed on.", CHAT)}
    paths[f"{BELOW}/completions"] = {"post": _operation("Completion", "Several prompts may be sent.", COMPLETIONS)}
    for path in paths.values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = {"description": "Refused, with the reason", "content": _json(ERROR)}
    components = dict(schema.get("components", {}))
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return orjson.dumps({**schema, "paths": paths, "components": components, "security": [{"key": []}]})


def _operation(summary: str, more: str, body: dict[str, Any]) -> dict[str, Any]:
    uids = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in ("trajectory_uid", "prompt_uid")]
    marks = [{"name": name, "in": "header", "schema": TEXT, "description": text} for name, text in MARKS.items()]
    answers: dict[str, Any] = {
        "200": {
            "description": "OpenAI's answer; server-sent events where stream is true",
            "content": {**_json(OBJECT), "text/event-stream": {"schema": TEXT}},
        }
    }
    return {
        "summary": summary,
        "description": f"OpenAI's call; every choice becomes a step. {more}",
        "operationId": summary.lower().replace(" ", "_"),
        "parameters": [*uids, *marks],
        "requestBody": {"required": True, "content": _json(body)},
        "responses": answers,
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
