"""Answers of an engine by script, whole and as a stream, for dialects that clients speak by their own SDKs."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMPT_IDS = [7, 8, 9]
ODD_TEXTS = (
    *("a", " b", "\n", "\n\n", "\t", "\0", "\x7f", "\u2028", "\ufeff", "é", "e\u0301", "你好", "שלום", "\U0010ffff"),
    *("\U0001f9d1\u200d\U0001f680", "<|im_end|>", "</think>", "data: {}\n\nevent: ping\n\n", "null", "{}", "%d"),
    *('"', "'", "\\", "\\u00e9", "\\ud83d"),
)
NAMES = ("add", "read_file", "Bash", "mcp__x__y-z")


@dataclass(frozen=True)
class ScriptedCall:
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ScriptedAnswer:
    text: str = ""
    reasoning: str = ""
    calls: Sequence[ScriptedCall] = ()
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    prompt_ids: Sequence[int] = field(default_factory=lambda: PROMPT_IDS)
    response_tokens: int = 5

    def message(self) -> dict[str, Any]:
        """As the engine writes it."""
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if calls else "")}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return {**message, "tool_calls": calls} if calls else message

    def whole(self) -> bytes:
        choice = {"index": 0, "message": self.message(), "token_ids": list(range(self.response_tokens))}
        return json.dumps(self._answer({**choice, **self._end()}) | {"usage": self._usage()}).encode()

    def events(self, rng: random.Random) -> Iterator[bytes]:
        """The same as a stream, cut at random."""
        first = self._answer(self._piece({"role": "assistant", "content": ""}))
        yield _event(first | {"prompt_token_ids": list(self.prompt_ids)})
        for delta in self._deltas(rng):
            yield _event(self._answer(self._piece(delta)))
        yield _event(self._answer({**self._piece({}), **self._end()}))
        yield _event({**self._answer(), "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _deltas(self, rng: random.Random) -> Iterator[dict[str, Any]]:
        for piece in _cut(self.reasoning, rng):
            yield {"reasoning": piece}
        for piece in _cut(self.text, rng):
            yield {"content": piece}
        for index, call in enumerate(self.calls):
            function: dict[str, Any] = {"name": call.name}
            pieces = _cut(call.arguments, rng)
            if pieces and rng.random() < 0.3:
                function["arguments"] = pieces.pop(0)
            yield {"tool_calls": [{"index": index, "id": call.call_id, "type": "function", "function": function}]}
            for piece in pieces:
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            if rng.random() < 0.2:
                yield {"tool_calls": [{"index": index, "function": {"arguments": ""}}]}

    def _piece(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": [1]}

    def _end(self) -> dict[str, Any]:
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.prompt_ids), "completion_tokens": self.response_tokens}

    def _answer(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": list(choices)}


def random_text(rng: random.Random, longest: int = 6) -> str:
    return "".join(rng.choices(ODD_TEXTS, k=rng.randint(0, longest)))


def random_answer(rng: random.Random, *, tools: bool) -> ScriptedAnswer:
    calls = [_random_call(rng, place) for place in range(rng.randint(0, 3))] if tools else []
    finish, stop = rng.choice([("stop", None), ("stop", "STOP"), ("stop", 151_645), ("length", None)])
    if calls and finish == "stop":
        finish, stop = rng.choice(["tool_calls", "stop"]), None
    return ScriptedAnswer(
        text=random_text(rng),
        reasoning=random_text(rng) if rng.random() < 0.5 else "",
        calls=calls,
        finish_reason=finish,
        stop_reason=stop,
        prompt_ids=range(rng.randint(1, 9)),
        response_tokens=rng.randint(1, 9),
    )


def _random_call(rng: random.Random, place: int) -> ScriptedCall:
    given: dict[str, Any] = {
        random_text(rng, 2): rng.choice([1, -0.5, None, True, random_text(rng), [{}], {"a": []}]) for _ in range(2)
    }
    arguments = json.dumps(given, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
    return ScriptedCall(f"chatcmpl-tool-{rng.getrandbits(32):x}-{place}", rng.choice(NAMES), arguments)


def _cut(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(0, 4)))) if len(text) > 1 else []
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if start < end]


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"
