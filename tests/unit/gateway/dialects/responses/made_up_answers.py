"""Made-up answers of an engine, whole and cut into chunks, and the client's tools that they call."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

CRM = {"type": "namespace", "name": "crm", "description": "Customers."}
TOOLS: dict[str, dict[str, Any]] = {
    "search": {"type": "function", "name": "search", "description": "Finds.", "parameters": {"type": "object"}},
    "apply_patch": {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    },
    "local_shell": {"type": "local_shell"},
    "crm__lookup": {**CRM, "tools": [{"type": "function", "name": "lookup", "parameters": {"type": "object"}}]},
    "crm__note": {**CRM, "tools": [{"type": "custom", "name": "note"}]},
}
"""By the names of their functions."""
FUNCTIONS = tuple(TOOLS)
CUSTOM = ("apply_patch", "crm__note")
LETTERS = [
    '"',
    "\\",
    "\n",
    "\t",
    "\r",
    "/",
    "{",
    "}",
    " ",
    "a",
    "B",
    "é",
    "ß",
    "漢",
    "🙂",
    "👩‍💻",
    "\u2028",
    "\x7f",
    "\x01",
    "​",
    "ن",
]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    message: Json
    """A chat message with `reasoning`, `content` and `tool_calls`, each of which may be missing."""
    finish_reason: str
    ids: list[int]
    prompt_ids: list[int]

    def whole(self) -> Json:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": None, **self.message},
            "finish_reason": self.finish_reason,
            "token_ids": self.ids,
            "logprobs": {"content": [_logprob()] * len(self.ids)},
        }
        return {**_head(), "choices": [choice], "usage": self._usage(), "prompt_token_ids": self.prompt_ids}

    def chunks(self, luck: Random) -> Iterator[Json]:
        """In the order of vLLM: reasoning, text, calls. The ids are spread over the chunks."""
        deltas = [{"role": "assistant", "content": ""}, *_deltas(self.message, luck), {}]
        places = sorted(luck.randint(0, len(self.ids)) for _ in deltas[2:])
        bounds = [0, 0, *places, len(self.ids)]
        for number, delta in enumerate(deltas):
            ids = self.ids[bounds[number] : bounds[number + 1]]
            is_last = number == len(deltas) - 1
            choice = {
                "index": 0,
                "delta": delta,
                "finish_reason": self.finish_reason if is_last else None,
                "token_ids": ids,
                "logprobs": {"content": [_logprob()] * len(ids)},
            }
            yield {**_head(), "choices": [choice], **({} if number else {"prompt_token_ids": self.prompt_ids})}
        yield {**_head(), "choices": [], "usage": self._usage()}

    def _usage(self) -> Json:
        details = {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": {"reasoning_tokens": 2}}
        return {"prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.ids), **details}


def make_answer(luck: Random) -> Answer:
    message: Json = {}
    if luck.random() < 0.5:
        message["reasoning"] = make_text(luck, 1)
    if luck.random() < 0.6:
        message["content"] = make_text(luck, 1)
    calls = [_make_call(luck, number) for number in range(luck.choice([0, 0, 1, 1, 2, 3]))]
    finish = "tool_calls" if calls else "stop"
    if luck.random() < 0.2:
        finish = "length"
        if calls and (arguments := calls[-1]["function"]["arguments"]):
            calls[-1]["function"]["arguments"] = arguments[: luck.randint(0, len(arguments) - 1)]
    if calls:
        message["tool_calls"] = calls
    return Answer(message, finish, make_ids(luck), make_ids(luck))


def tools_for(answer: Answer) -> list[Json]:
    """The tools that it calls, and one that runs at OpenAI."""
    calls = answer.message.get("tool_calls", ())
    names = dict.fromkeys(call["function"]["name"] for call in calls)
    return [*(TOOLS[name] for name in names), {"type": "web_search"}] if names else []


def make_text(luck: Random, shortest: int = 0) -> str:
    return "".join(luck.choices(LETTERS, k=luck.randint(shortest, 40)))


def make_ids(luck: Random) -> list[int]:
    return [luck.randrange(2**31) for _ in range(luck.randint(1, 8))]


def cut(luck: Random, text: str) -> list[str]:
    """In up to three pieces."""
    places = sorted({0, len(text), *(luck.randint(0, len(text)) for _ in range(luck.randint(0, 2)))})
    return [text[start:end] for start, end in pairwise(places)]


def _make_call(luck: Random, number: int) -> Json:
    name = luck.choice(FUNCTIONS)
    value: Json = {"q": make_text(luck), "n": luck.randrange(9)}
    if name in CUSTOM:
        value = {"input": make_text(luck)}
    elif name == "local_shell":
        value = {"command": ["echo", make_text(luck)], **({"timeout_ms": 5} if luck.random() < 0.5 else {})}
    arguments = json.dumps(value, ensure_ascii=luck.random() < 0.5)
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _deltas(message: Json, luck: Random) -> Iterator[Json]:
    for name in ("reasoning", "content"):
        yield from ({name: piece} for piece in cut(luck, message.get(name, "")))
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        named = {"index": index, "id": call["id"], "type": "function", "function": {"name": function["name"]}}
        yield {"tool_calls": [named]}
        for piece in cut(luck, function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _head() -> Json:
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny"}


def _logprob() -> Json:
    return {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
