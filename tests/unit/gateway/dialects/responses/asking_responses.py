"""Calls in the Responses dialect, and their items."""

import json
from typing import Any

from stepwell.gateway.dialects.responses_dialect import ResponsesDialect

from stepwell.access.access_keys import AccessKeys
from stepwell.gateway.dialects.chat_form import StepSeal
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall

SEAL = StepSeal(AccessKeys(["control-key-of-the-tests"]))
AROUND = DialectContext(response_length=64, seal=SEAL)
RESPONSES = ResponsesDialect()
ONE, TWO = "1" * 32, "2" * 32
Json = dict[str, Any]


def ask(*items: Json, **fields: Any) -> ModelCall:
    return RESPONSES.read(json.dumps({"model": "m", "input": list(items) or "hello", **fields}).encode(), AROUND)


def messages(*items: Json, **fields: Any) -> list[Json]:
    return list(ask(*items, **fields).request["messages"])


def user(text: str = "go") -> Json:
    return {"role": "user", "content": text}


def said(text: str, uid: str | None = None) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "role": "assistant", "content": content}
    return item if uid is None else {**item, "id": SEAL.attach("msg_0", uid)}


def called(number: int, uid: str | None = None, **fields: Any) -> Json:
    call_id = f"c{number}" if uid is None else SEAL.attach(f"c{number}", uid)
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **fields}


def returned(number: int, uid: str | None = None) -> Json:
    call_id = f"c{number}" if uid is None else SEAL.attach(f"c{number}", uid)
    return {"type": "function_call_output", "call_id": call_id, "output": f"r{number}"}


def tool_calls(*numbers: int) -> list[Json]:
    """As chat has them."""
    return [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in numbers]


def tool(number: int) -> Json:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": f"r{number}"}
