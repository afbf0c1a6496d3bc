"""Digests of conversations: what a recorded step and a later request must have in common.

- Two messages have the same digest if a chat template cannot tell them apart: tool arguments are compared as JSON, a
  text and a list with this one text are equal, and no content is an empty text.
- Or if clients send one back for the other: 5 for 5.0 in tool arguments, a default of the tool's schema for an argument
  that the model left out, nothing for a reply's text of blanks alone, reasoning without the blanks around it.
- The ids of tool calls are left out, because dialects rename them; a tool's answer counts by the place of its call.
- Reasoning has a digest of its own: clients often drop it, but none may replace it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import orjson

from stepwell.gateway.dialects.openai import is_json_object
from stepwell.steps.step import Json, JsonObject
from stepwell.steps.trainable import is_text_part

THINK_END = "</think>"
END_OF_THINKING = (THINK_END, "[/THINK]", "</thinking>", "</thought>", "</reasoning>", "</seed:think>", "◁/think▷")
"""One of them is the digest of thinking that is part of the content: the content has its own digest."""
TEMPLATE_FIELDS = ("chat_template_kwargs", "reasoning_effort", "documents", "add_special_tokens")
"""Fields of a request, beside messages and tools, that its chat template reads."""
CHAIN_BYTES, FIELD_BYTES = 16, 8

Defaults: TypeAlias = Mapping[str, Mapping[str, str]]
"""The defaults by the names of a tool and of its argument, as JSON: the tool's schema has them."""
NO_DEFAULTS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class RequestDigest:
    whole: str
    """The digest of all messages."""
    tools: str
    template: str
    """The digest of the chat template and of the fields that it reads beside messages and tools."""
    thoughts: Mapping[int, str] = field(default_factory=dict)
    """The digests of the reasoning that the client sends, by the place of the message."""
    reply_at: int = -1
    """The place of the last assistant message; -1 if there is none."""
    replied: str = ""
    """The digest of the messages up to and with the last assistant message."""
    asked: str = ""
    """The digest of the messages before it."""
    messages: int = 0
    is_text: bool = True
    """All content is text."""
    defaults: Defaults = field(default_factory=dict)
    """The defaults of its tools."""


@dataclass(frozen=True, slots=True)
class ConversationDigest:
    """The part of a conversation that a step keeps, so that a later call can continue it."""

    replied: str
    """The digest of its messages with its reply as it was served. A request that begins so continues the step."""
    asked: str
    """The same without the reply."""
    tools: str
    template: str
    thoughts: Mapping[int, str]
    """The thinking that the model wrote or saw, by the place of its message."""

    def to_json(self) -> JsonObject:
        thoughts: dict[str, Json] = {str(place): digest for place, digest in self.thoughts.items()}
        return {
            "replied": self.replied,
            "asked": self.asked,
            "tools": self.tools,
            "template": self.template,
            **({"thoughts": thoughts} if thoughts else {}),
        }


def read_conversation_digest(stored: JsonObject) -> ConversationDigest | None:
    """None for a step that keeps none."""
    thoughts = stored.get("thoughts") or {}
    if not isinstance(thoughts, Mapping) or not stored.keys() >= {"replied", "asked", "tools", "template"}:
        return None
    return ConversationDigest(
        replied=str(stored["replied"]),
        asked=str(stored["asked"]),
        tools=str(stored["tools"]),
        template=str(stored["template"]),
        thoughts={int(place): str(digest) for place, digest in thoughts.items()},
    )


def digest_request(request: Mapping[str, Any], engine_template: str = "") -> RequestDigest:
    """The digests of a chat request whose messages a dialect has checked, for engines with that chat template."""
    messages: Sequence[Mapping[str, Any]] = request["messages"]
    chain, asked, replied, reply_at = b"", b"", b"", -1
    thoughts: dict[int, str] = {}
    calls: dict[str, int] = {}
    defaults = _defaults(request.get("tools"))
    is_text = True
    for place, message in enumerate(messages):
        is_reply = message["role"] == "assistant"
        before, chain = chain, _link(chain, message, calls, defaults)
        is_text = is_text and _is_text(message.get("content"))
        if is_reply:
            asked, replied, reply_at = before, chain, place
            calls = _call_places(message)
            if thought := thought_of(message):
                thoughts[place] = thought
    return RequestDigest(
        whole=chain.hex(),
        tools=_digest([request.get("tools") or [], request.get("tool_choice") == "none"]),
        template=_digest([engine_template, *(request.get(name) for name in TEMPLATE_FIELDS)]),
        thoughts=thoughts,
        reply_at=reply_at,
        replied=replied.hex(),
        asked=asked.hex(),
        messages=len(messages),
        is_text=is_text,
        defaults=defaults,
    )


def conversation_digest_of(
    asked: RequestDigest, reply: Mapping[str, Any], inherited: Mapping[int, str]
) -> ConversationDigest:
    """The digest of the conversation up to a step. `inherited` is the thinking that a bridge kept in its prompt."""
    thoughts = {**asked.thoughts, **inherited}
    if thought := thought_of(reply):
        thoughts[asked.messages] = thought
    replied = _link(bytes.fromhex(asked.whole), {**reply, "role": "assistant"}, {}, asked.defaults)
    return ConversationDigest(replied.hex(), asked.whole, asked.tools, asked.template, thoughts)


def thought_of(message: Mapping[str, Any]) -> str:
    """The digest of an assistant message's reasoning; empty if it has none."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str) and (text := reasoning.strip()):
        return blake2b(text.encode(), digest_size=FIELD_BYTES).hexdigest()
    content = message.get("content")
    texts = [content] if isinstance(content, str) else _texts(content)
    return next((mark for mark in END_OF_THINKING if any(mark in text for text in texts)), "")


def canonical_arguments(arguments: object, defaults: Mapping[str, str] = NO_DEFAULTS) -> str:
    """Arguments of a tool call, as JSON with sorted keys. What is no JSON object counts as the chat dialect repairs
    it. Clients in JavaScript send 5 where the model wrote 5.0: both are 5. Claude Code adds arguments that the model
    left out, with their defaults: an argument that has its default counts as left out."""
    if isinstance(arguments, str) and arguments:
        is_object = is_json_object(arguments)
        value = json.loads(arguments, parse_float=_number) if is_object else {"malformed": arguments}
    else:
        value = arguments or {}
    if defaults and isinstance(value, dict):
        value = {name: given for name, given in value.items() if defaults.get(name) != _sorted_json(given)}
    return _sorted_json(value)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _defaults(tools: object) -> Defaults:
    defaults: dict[str, Mapping[str, str]] = {}
    for tool in tools if isinstance(tools, list) else []:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": dict(properties)}}}:
                if declared := {key: _default(of) for key, of in properties.items() if _has_default(of)}:
                    defaults[name] = declared
    return defaults


def _has_default(schema: object) -> bool:
    return isinstance(schema, dict) and "default" in schema


def _default(schema: Mapping[str, Any]) -> str:
    """The default, with numbers as in tool arguments."""
    return _sorted_json(json.loads(json.dumps(schema["default"]), parse_float=_number))


def _sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _link(chain: bytes, message: Mapping[str, Any], calls: Mapping[str, int], defaults: Defaults) -> bytes:
    role, content = message["role"], _content(message.get("content"))
    if role == "assistant" and isinstance(content, str) and content.isspace():
        content = ""  # models write blanks between thinking and a tool call; Claude Code does not send them back
    said = [role, message.get("name"), content, *_calls(message, calls, defaults)]
    return blake2b(chain + orjson.dumps(said), digest_size=CHAIN_BYTES).digest()


def _content(content: object) -> object:
    if isinstance(content, list):
        if len(texts := _texts(content)) == len(content):
            return texts[0] if len(texts) == 1 else texts or ""
        return content
    return content or ""


def _calls(message: Mapping[str, Any], calls: Mapping[str, int], defaults: Defaults) -> list[object]:
    if message["role"] == "tool":
        call_id = message.get("tool_call_id")
        return [calls.get(call_id, call_id) if isinstance(call_id, str) else call_id]
    named = [(_name(call), _arguments(call)) for call in message.get("tool_calls") or []]
    return [[name, canonical_arguments(given, defaults.get(str(name), NO_DEFAULTS))] for name, given in named]


def _call_places(message: Mapping[str, Any]) -> dict[str, int]:
    ids = [call.get("id") for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    return {call_id: place for place, call_id in enumerate(ids) if isinstance(call_id, str)}


def _name(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _is_text(content: object) -> bool:
    return not isinstance(content, list) or len(_texts(content)) == len(content)


def _texts(content: object) -> list[str]:
    """The texts of a list of parts, without its other parts."""
    parts = content if isinstance(content, list) else []
    return [
        part["text"]
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and is_text_part(part)
    ]


def _digest(value: object) -> str:
    raw = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return blake2b(raw, digest_size=FIELD_BYTES).hexdigest()
