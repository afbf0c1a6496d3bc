"""How clients call in each dialect of our gateway, and how answers end. All ask the same and get the same answer."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks.gateway_rig import canned

CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Spoken:
    path: str
    """Below a base_url."""
    ending: bytes
    """The last bytes of a stream that has its end."""
    body: Callable[[bool, str], bytes]
    """The request: whether it is streamed, and the user, who makes it different from others'."""
    text: Callable[[Any], str]
    """The text of a whole answer."""
    piece: Callable[[Any], str]
    """The text that the data of an event adds."""


def _chat_body(stream: bool, user: str) -> bytes:
    return canned.request_body(stream=stream, user=user)


def _messages_body(stream: bool, user: str) -> bytes:
    asked = json.loads(canned.request_body(stream=stream))
    system, *messages = asked["messages"]
    fields = {name: asked[name] for name in ("model", "stream", "max_tokens", "temperature")}
    return orjson.dumps({**fields, "system": system["content"], "messages": messages, "metadata": {"user_id": user}})


def _responses_body(stream: bool, user: str) -> bytes:
    asked = json.loads(canned.request_body(stream=stream))
    fields = {name: asked[name] for name in ("model", "stream", "temperature")}
    rest = {"max_output_tokens": asked["max_tokens"], "store": False, "metadata": {"user": user}}
    return orjson.dumps({**fields, **rest, "input": asked["messages"]})


def _chat_piece(chunk: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _delta_text(event: Any) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


def _output_text(answer: Any) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item.get("content") or ())


SPOKEN: Mapping[str, Spoken] = {
    CHAT: Spoken(
        "chat/completions",
        b"[DONE]\n\n",
        _chat_body,
        lambda answer: str(answer["choices"][0]["message"]["content"]),
        _chat_piece,
    ),
    "messages": Spoken(
        "messages",
        b'"message_stop"}\n\n',
        _messages_body,
        lambda answer: "".join(block["text"] for block in answer["content"]),
        _delta_text,
    ),
    "responses": Spoken(
        "responses",
        b"}\n\n",
        _responses_body,
        _output_text,
        lambda event: str(event["delta"]) if event["type"] == "response.output_text.delta" else "",
    ),
}
"""By the name of the dialect."""


def events(raw: bytes) -> Iterator[Any]:
    """The data of a stream's events."""
    for event in raw.decode().split("\n\n")[:-1]:
        data = event.partition("data: ")[2]
        if data != "[DONE]":
            yield json.loads(data)
