"""The tokens that a chat template puts after a reply, cut out of a rendering of a short stand-in conversation.

The reply is replaced by a sentinel, in the last tool call's arguments if it has calls. What follows the sentinel in the
rendered ids is the end of the reply and the new messages. The parent's tokens already have the token that ended the
reply, so the delta begins right after it.

A template is probed once for each shape of a continuation:
- The ids before the reply are the same whether or not the new messages follow.
- What follows the sentinel does not depend on what comes before it: earlier turns, tools, the reply's other texts.
- The sentinel is shown, and the new messages are shown after it.
- The reply ends in the token that the model sampled last, before anything of the new messages. This holds also where
  this token opens the next message, and not where a template writes another one in its place. It stands there once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import orjson

from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge
from stepwell.steps.prefix_tree import common_prefix
from stepwell.steps.step import IntArray

TAIL_ROLES = ("tool", "user", "system")
INSTRUCTIONS = ("developer", "system")
"""If there are both, vLLM handles them as if all were of the first."""
QUESTION = {"role": "user", "content": "hi"}
FILLER, OTHER_FILLER = "ok", "no"
CALL_IDS, EARLIER_CALL_ID = ("callaaaa1", "callaaaa2"), "callaaaa0"
"""Nine letters and digits: Mistral's templates accept no others."""
TOOL_NAME = "lookup"

ChatMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ContinuationShape:
    """The features that decide how a chat template renders a reply and the messages after it, apart from their
    texts."""

    calls: int
    """Tool calls of the reply; 2 stands for several."""
    has_text: bool
    roles: tuple[str, ...]
    """The roles of the new messages; of several alike in a row, the first two."""
    instructions: str = ""
    """The role of the instructions before the reply, one of INSTRUCTIONS; empty if there are none."""


def shape_of(reply: ChatMessage, tail: Sequence[ChatMessage], head: Sequence[ChatMessage] = ()) -> ContinuationShape:
    before = {message["role"] for message in head}
    runs = (list(run)[:2] for _, run in groupby(message["role"] for message in tail))
    roles = tuple(role for run in runs for role in run)
    calls = min(2, len(reply.get("tool_calls") or []))
    instructions = next((role for role in INSTRUCTIONS if role in before), "")
    return ContinuationShape(calls, bool(reply.get("content")), roles, instructions)


def model_head(shape: ContinuationShape) -> list[ChatMessage]:
    """The messages before the reply, as few as possible."""
    return [*([{"role": shape.instructions, "content": FILLER}] if shape.instructions else []), QUESTION]


def other_model_head(shape: ContinuationShape) -> list[ChatMessage]:
    """The same with other texts and earlier turns."""
    roles = [*([shape.instructions] if shape.instructions else []), "user", "assistant", "user"]
    head: list[ChatMessage] = [{"role": role, "content": OTHER_FILLER} for role in roles]
    if not shape.calls:
        return head
    called = {"role": "assistant", "content": None, "tool_calls": [_call(EARLIER_CALL_ID, TOOL_NAME, OTHER_FILLER)]}
    return [*head, called, {"role": "tool", "tool_call_id": EARLIER_CALL_ID, "content": OTHER_FILLER}]


def model_reply(shape: ContinuationShape) -> ChatMessage:
    """A reply of that shape."""
    content = FILLER if shape.has_text or not shape.calls else None
    calls = [_call(call_id, TOOL_NAME, FILLER) for call_id in CALL_IDS[: shape.calls]]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def model_tail(shape: ContinuationShape, text: str) -> list[ChatMessage]:
    """New messages of that shape."""
    tail: list[ChatMessage] = []
    tools = 0
    for role in shape.roles:
        message = {"role": role, "content": text}
        if role == "tool":
            message["tool_call_id"] = CALL_IDS[min(tools, max(0, shape.calls - 1))]
            tools += 1
        tail.append(message)
    return tail


def stand_in(reply: ChatMessage, sentinel: str, filler: str = FILLER) -> ChatMessage:
    """A message with the tool calls of `reply` and the sentinel as the last that it says, after fillers."""
    calls = reply.get("tool_calls") or []
    if not calls:
        return {"role": "assistant", "content": sentinel}
    said = [filler] * (len(calls) - 1) + [sentinel]
    named = [(str(call.get("id")), str(call["function"]["name"])) for call in calls]
    return {
        "role": "assistant",
        "content": filler if reply.get("content") else None,
        "tool_calls": [_call(call_id, name, text) for (call_id, name), text in zip(named, said, strict=True)],
    }


def stand_in_tools(reply: ChatMessage, filler: str = FILLER) -> list[ChatMessage]:
    """Small tools with the names that `reply` calls: templates only look at what they show of them."""
    names = dict.fromkeys(str(call["function"]["name"]) for call in reply.get("tool_calls") or []) or [TOOL_NAME]
    value = {"type": "object", "properties": {"value": {"type": "string", "description": filler}}}
    return [
        {"type": "function", "function": {"name": name, "description": filler, "parameters": value}} for name in names
    ]


@dataclass(frozen=True, slots=True)
class ReplyAnchor:
    """How a template shows a sentinel and what stands between it and the new messages."""

    sentinel: IntArray
    follows: IntArray
    is_call: bool
    """The sentinel is in a tool call, so that the call's end comes before the reply's."""

    def until(self, last_token: int) -> IntArray:
        """The sentinel and what follows it, to the token that the model sampled last."""
        ends = np.flatnonzero(self.follows == last_token)
        if len(ends) != 1 or (ends[0] and not self.is_call):
            raise CannotBridge(BridgeOutcome.CLOSE_DIFFERS)
        return np.concatenate([self.sentinel, self.follows[: ends[0] + 1]])


def find_anchor(
    shown: IntArray,
    other_sentinel: IntArray,
    other_tail: IntArray,
    other_head: IntArray,
    head: IntArray,
    *,
    is_call: bool,
) -> ReplyAnchor:
    """Finds the anchor in renderings of a stand-in conversation: once as it is, with another sentinel, with other new
    messages, with all else other, and only what comes before the reply."""
    start, end = common_prefix(shown, other_sentinel), len(shown) - common_prefix(shown[::-1], other_sentinel[::-1])
    if start < len(head) or not np.array_equal(shown[: len(head)], head):
        raise CannotBridge(BridgeOutcome.HEAD_CHANGES)
    tail_at = common_prefix(shown, other_tail)
    if not start < end <= tail_at < len(shown):
        raise CannotBridge(BridgeOutcome.NOT_ANCHORED)
    if not np.array_equal(other_head[start - len(shown) :], shown[start:]):
        raise CannotBridge(BridgeOutcome.HEAD_CHANGES)
    return ReplyAnchor(shown[start:end], shown[end:tail_at], is_call)


def cut_delta(rendered: IntArray, anchor: IntArray) -> IntArray:
    """The tokens that follow the anchor, which must be there once."""
    raw, wanted = rendered.tobytes(), anchor.tobytes()
    found = _aligned(raw, wanted, 0)
    if found < 0 or _aligned(raw, wanted, found + rendered.itemsize) >= 0:
        raise CannotBridge(BridgeOutcome.NOT_ANCHORED)
    return rendered[found // rendered.itemsize + len(anchor) :]


def _aligned(raw: bytes, wanted: bytes, start: int) -> int:
    found = raw.find(wanted, start)
    while found >= 0 and found % 4:
        found = raw.find(wanted, found + 1)
    return found


def _call(call_id: str, name: str, text: str) -> dict[str, Any]:
    arguments = orjson.dumps({"value": text}).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
