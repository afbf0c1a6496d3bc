"""`/v1/chat/completions/derender`: the tokens of a generation, turned into the chat reply that they spell.

As in vLLM with parsers: they run on the whole text, control tokens and all, so that an end of turn among the tokens
shows in the content; and the finish reason stays the generation's own.
"""

import json
import re
import secrets
import time
from typing import TYPE_CHECKING

from aiohttp import web

from rig.fake_engine.admin import BODY
from rig.fake_engine.asking import Json, RefusedError, required
from rig.vocabulary import pieces, token_name

if TYPE_CHECKING:
    from rig.fake_engine.engine import FakeEngine

THOUGHT = re.compile("<think>(.*?)(?:</think>|$)", re.DOTALL)
CALL = re.compile("<tool_call>(.*?)</tool_call>", re.DOTALL)


def derender_chat(engine: "FakeEngine", request: web.Request) -> Json:
    body: Json = request[BODY]
    if body.get("stream"):
        raise RefusedError(400, "BadRequestError", "the fake engine derenders whole replies only", "stream")
    generated, asked = required(body, "generate_response"), body.get("chat_request") or {}
    prompt_tokens = body.get("prompt_tokens") or 0
    completion_tokens = sum(len(choice["token_ids"] or ()) for choice in generated["choices"])
    return {
        "id": generated.get("request_id") or secrets.token_hex(16),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or engine.model,
        "choices": [_choice(choice, asked) for choice in generated["choices"]],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(choice: Json, asked: Json) -> Json:
    ids = choice.get("token_ids")
    if not ids:
        message = f"choice {choice['index']} has empty or null token_ids"
        raise RefusedError(400, "BadRequestError", message)
    return {
        "index": choice["index"],
        "message": _message("".join(_names(ids)), asked),
        "logprobs": _logprobs(choice),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
        "token_ids": ids if asked.get("return_token_ids") else None,
        "routed_experts": None,
    }


def _message(text: str, asked: Json) -> Json:
    thought = THOUGHT.match(text)
    content = text[thought.end() :] if thought else text
    message: Json = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": thought[1] if thought and asked.get("include_reasoning", True) else None,
    }
    calls = CALL.findall(content) if asked.get("tools") and asked.get("tool_choice") != "none" else []
    if calls:
        message["content"] = content[: content.index("<tool_call>")] or None
        message["tool_calls"] = [_call(written) for written in calls]
    return message


def _call(written: str) -> Json:
    call = json.loads(written)
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {
        "id": secrets.token_hex(16),
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }


def _logprobs(choice: Json) -> Json | None:
    if choice.get("logprobs") is None:
        return None
    entries = zip(_names(choice["token_ids"]), choice["logprobs"]["content"], strict=True)
    return {
        "content": [
            _named(name, entry["logprob"]) | {"top_logprobs": [_top(other) for other in entry["top_logprobs"]]}
            for name, entry in entries
        ]
    }


def _top(entry: Json) -> Json:
    return _named(_names([entry["token_id"]])[0], entry["logprob"])


def _names(ids: list[int]) -> list[str]:
    return [token_name(*token) for token in zip(ids, pieces(ids), strict=True)]


def _named(name: str, logprob: float) -> Json:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode())}
