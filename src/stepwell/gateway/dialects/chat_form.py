"""Writes requests in OpenAI's chat form, for dialects that translate into it.

- The parts of one conversation are written in the same way each time: what was sent before stays a prefix.
- Tool calls have the ids of the engine: the seal that a dialect attached to an id is removed again.
"""

from collections.abc import Mapping
from typing import Any


class EchoedSteps:
    """The steps that a request sends back sealed."""

    def __init__(self, seal: StepSeal) -> None:
        self._seal = seal
        self._opened: dict[str, str | None] = {}
        """The uids by sealed text, in the order of the history. Parallel tool calls have the same."""

    def note(self, text: str) -> str | None:
        """Take a text that may end in a sealed uid, such as a signature. Returns the uid."""
        sealed = text[-SEALED_LENGTH:]
        if sealed not in self._opened:
            self._opened[sealed] = self._seal.opened(sealed)
        return self._opened[sealed]

    def detach(self, text: str) -> str:
        """The same for an id that a seal may be attached to. Returns the id without it."""
        return text if self.note(text) is None else text[: -SEALED_LENGTH - len(SEPARATOR)]

    def uids(self) -> tuple[str, ...]:
        """Each once, in the order in which they were first noted."""
        return tuple(dict.fromkeys(uid for uid in self._opened.values() if uid is not None))


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def joined_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content: one text, a line for each part, unless there are images.

    A client may send the same text once as a string and once as a list of parts; both become the same.
    """
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool = False
) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(call_id: str, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def assistant_message(text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as an engine writes its own: without text but with tool calls, the content is null."""
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not tool_calls else None}
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def joined_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the system texts at their beginning as one: many chat templates accept only one."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system" and isinstance(messages[count]["content"], str):
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
