"""The messages an agent sends back, mended where an engine would refuse the whole conversation for one old flaw."""

import json
from typing import Any

import orjson

from stepwell.errors import BadRequest


def mend_messages(messages: object) -> int:
    """Mend in place; gives how many tool calls were malformed.

    A model that once wrote arguments that are no JSON object has them in its history for good, and engines that parse
    the history would end the episode there. They are passed on as an object that holds the raw string. A message's
    thinking is passed on under both of its names.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    malformed = 0
    for message in messages:
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise BadRequest("every message must be an object with a role")
        if role == "assistant":
            name_both(message)
            if calls := message.get("tool_calls"):
                malformed += _mend_calls(calls)
    return malformed


def name_both(message: dict[str, Any]) -> None:
    """`reasoning` and `reasoning_content` are one thing under two names: whoever has one gets both."""
    one, other = message.get("reasoning"), message.get("reasoning_content")
    if one is not None and other is None:
        message["reasoning_content"] = one
    elif other is not None and one is None:
        message["reasoning"] = other


def _mend_calls(calls: object) -> int:
    if not isinstance(calls, list):
        raise BadRequest("a message's tool_calls must be a list")
    return sum(map(_mend_call, calls))


def _mend_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return False
    if arguments == "" or _is_object(arguments):
        return False
    function["arguments"] = orjson.dumps({"malformed": arguments}).decode()
    return True


def _is_object(text: str) -> bool:
    """As the engines' own parser sees it, which takes NaN and Infinity; half a character, which no tokenizer takes, is
    none."""
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
