"""The request that all clients send, and the answer that the engine gives to it: prepared once, the same for everyone.

The answer has vLLM's shape (the rig's test compares it with the fake engine's), and token ids and log-probabilities
whether or not they were asked for: so no gateway has less to carry than another.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import orjson

from rig.fake_engine.asking import Json

MODEL = "tiny"
PROMPT, RESPONSE, A_CHUNK = 2_048, 256, 4
"""Tokens."""
CHUNKS = RESPONSE // A_CHUNK
MESSAGES, REQUEST_BYTES = 20, 8_000
VOCABULARY = 150_000
WORDS = ("step", " well", " reward", " the", " of", " token", "ing", " grüße", ".\n", " pool", " agent", " learns")
DONE = b"data: [DONE]\n\n"
NAMED = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_760_000_000, "model": MODEL}


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine says."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    pieces: list[str]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@cache
def make_reply() -> Reply:
    luck = np.random.default_rng(0)
    return Reply(
        prompt_ids=luck.integers(0, VOCABULARY, PROMPT).tolist(),
        ids=luck.integers(0, VOCABULARY, RESPONSE).tolist(),
        logprobs=(-luck.exponential(size=RESPONSE)).astype(np.float32).tolist(),
        pieces=[WORDS[n] for n in luck.integers(0, len(WORDS), RESPONSE)],
    )


def request_body(*, stream: bool, user: str = "agent") -> bytes:
    """20 messages of an agent at work, 8 KB in all. No two users' are the same, so that none is taken for a retry."""
    roles = ["system", *(["user", "assistant"] * MESSAGES)][:MESSAGES]
    filler = "".join(make_reply().pieces * 4)[: REQUEST_BYTES // MESSAGES - 40]
    messages = [{"role": role, "content": filler} for role in roles]
    sampling = {"max_tokens": RESPONSE, "temperature": 1.0}
    return orjson.dumps({"model": MODEL, "messages": messages, "stream": stream, "user": user, **sampling})


def whole() -> Json:
    """The unstreamed answer."""
    reply = make_reply()
    message = {
        "role": "assistant",
        "content": reply.text,
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning")),
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(0, RESPONSE),
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": reply.ids,
        "routed_experts": None,
    }
    return {
        **_named("chat.completion", choice),
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0",
        "usage": _usage(RESPONSE) | {"prompt_tokens_details": None, "completion_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": reply.prompt_ids,
        **dict.fromkeys(("prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics")),
    }


def opening() -> Json:
    """A stream's first chunk."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunk = _named("chat.completion.chunk", choice)
    return chunk | {"prompt_token_ids": make_reply().prompt_ids, "prompt_text": None}


def chunk(number: int, *, last: bool = False) -> Json:
    """A stream's next tokens; a stream that is longer than the reply begins it again."""
    reply, start = make_reply(), number % CHUNKS * A_CHUNK
    end = start + A_CHUNK
    choice = {
        "index": 0,
        "delta": {"content": "".join(reply.pieces[start:end])},
        "logprobs": _logprobs(start, end),
        "finish_reason": "length" if last else None,
        "token_ids": reply.ids[start:end],
    }
    return _named("chat.completion.chunk", choice | ({"stop_reason": None} if last else {}))


def closing(chunks: int) -> Json:
    """A stream's last chunk, after so many with tokens."""
    counted = {"usage": _usage(chunks * A_CHUNK), "system_fingerprint": "vllm-0.32.0"}
    return _named("chat.completion.chunk") | counted


def event(payload: Json) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def _named(kind: str, *choices: Json) -> Json:
    return {"id": NAMED["id"], "object": kind, "created": NAMED["created"], "model": MODEL, "choices": list(choices)}


def _usage(completion: int) -> Json:
    return {"prompt_tokens": PROMPT, "total_tokens": PROMPT + completion, "completion_tokens": completion}


def _logprobs(start: int, end: int) -> Json:
    reply = make_reply()
    entries = zip(reply.pieces[start:end], reply.logprobs[start:end], strict=True)
    return {
        "content": [
            {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, value in entries
        ]
    }
