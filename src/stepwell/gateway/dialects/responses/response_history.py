"""The input of a request as chat messages.

- The output items of one step (reasoning, text, calls) become one assistant message again. Sealed ids tell which items
  belong together; without them, their order does.
- A call has the id that the engine gave it.
- Developers' messages are system messages: chat templates know no developer.
- An item of an unknown kind is refused: without it, the model would see another conversation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.chat_form import (
    EchoedSteps,
    StepSeal,
    image_part,
    joined_parts,
    text_part,
    tool_call,
    tool_message,
)
from stepwell.gateway.dialects.openai import write_json
from stepwell.gateway.dialects.responses_input import LOCAL_SHELL, ClientTools, decode_reasoning, function_name

Item: TypeAlias = Mapping[str, Any]

TEXT_PARTS = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text"))
NOT_STORED = "this gateway keeps no items: send the items themselves, with store=false"


@dataclass(slots=True)
class AssistantTurn:
    """The assistant message that the next output item may belong to."""

    message: dict[str, Any]
    uid: str | None
    last_kind: str
    is_answered: bool = False
    """Outputs of tools follow it."""

    def accepts(self, kind: str, uid: str | None) -> bool:
        """True if an item belongs to the same step."""
        if uid is not None and self.uid is not None:
            return uid == self.uid
        if self.is_answered or (kind == "reasoning" and self.last_kind != "reasoning"):
            return False
        return not kind == self.last_kind == "message"


def read_instructions(instructions: object) -> list[dict[str, Any]]:
    if instructions is None or instructions == "":
        return []
    if not isinstance(instructions, str):
        raise BadRequest("instructions must be a text")
    return [{"role": "system", "content": instructions}]


class ChatHistory:
    def __init__(self, seal: StepSeal, tools: ClientTools) -> None:
        self.messages: list[dict[str, Any]] = []
        self.echoed = EchoedSteps(seal)
        self._tools = tools
        self._turn: AssistantTurn | None = None
        self._shell_calls: dict[str, str] = {}
        """The ids of local shell calls by the ids of their items, which their outputs may name."""
        self._readers: dict[str, Callable[[Item], None]] = {
            "message": self._add_message,
            "reasoning": self._add_reasoning,
            "function_call": self._add_function_call,
            "function_call_output": self._add_output,
            "custom_tool_call": self._add_custom_call,
            "custom_tool_call_output": self._add_output,
            "local_shell_call": self._add_shell_call,
            "local_shell_call_output": self._add_output,
            "additional_tools": self._add_tools,
        }

    def add_input(self, given: object) -> None:
        if isinstance(given, str):
            self.messages.append({"role": "user", "content": given})
        elif isinstance(given, list):
            for item in given:
                self._add(item)
        elif given is not None:
            raise BadRequest("input must be a text or a list of items")
        if not self.messages:
            raise BadRequest("input must have at least one message")

    def _add(self, item: object) -> None:
        if not isinstance(item, dict):
            raise BadRequest("every item of the input must be an object")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise BadRequest(_unreadable(kind))
        reader(item)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _add_message(self, item: Item) -> None:
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            turn = self._answer("message", self._uid_of(item))
            turn["content"] = (turn["content"] or "") + _joined_text(content)
            return
        self._turn = None
        if role == "user":
            self.messages.append({"role": "user", "content": _chat_content(content)})
        elif role in ("system", "developer"):
            self.messages.append({"role": "system", "content": _chat_content(content)})
        else:
            raise BadRequest("a message's role must be user, assistant, system or developer")

    # -- what the model wrote ------------------------------------------------------------------------------------------

    def _add_reasoning(self, item: Item) -> None:
        sealed = item.get("encrypted_content") or ""
        if not isinstance(sealed, str):
            raise BadRequest("encrypted_content must be a text")
        sealed_text = decode_reasoning(self.echoed.detach(sealed))
        text = _joined_text(item.get("content")) or sealed_text or _joined_text(item.get("summary"))
        turn = self._answer("reasoning", self.echoed.note(sealed) or self._uid_of(item))
        if text:
            turn["reasoning"] = turn.get("reasoning", "") + text

    def _add_function_call(self, item: Item) -> None:
        self._add_call(item, _function_name(item), _text(item, "arguments"))

    def _add_custom_call(self, item: Item) -> None:
        self._add_call(item, _function_name(item), orjson.dumps({"input": _text(item, "input")}).decode())

    def _add_shell_call(self, item: Item) -> None:
        action = item.get("action")
        if not isinstance(action, dict):
            raise BadRequest("a local_shell_call must have an action")
        arguments = {name: value for name, value in action.items() if name != "type" and value not in (None, {})}
        self._add_call(item, LOCAL_SHELL, write_json(arguments, "a local_shell_call").decode())
        if isinstance(item_id := item.get("id"), str):
            self._shell_calls[item_id] = _text(item, "call_id")

    def _add_call(self, item: Item, name: str, arguments: str) -> None:
        call_id = _text(item, "call_id")
        message = self._answer("call", self.echoed.note(call_id) or self._uid_of(item))
        call = tool_call(self.echoed.detach(call_id), name, arguments)
        message.setdefault("tool_calls", []).append(call)
        message["content"] = message["content"] or None

    def _answer(self, kind: str, uid: str | None) -> dict[str, Any]:
        """The assistant message that an item of this kind belongs to."""
        turn = self._turn
        if turn is None or not turn.accepts(kind, uid):
            turn = self._turn = AssistantTurn({"role": "assistant", "content": ""}, uid, kind)
            self.messages.append(turn.message)
        turn.last_kind, turn.uid = kind, turn.uid or uid
        return turn.message

    # -- what tools returned -------------------------------------------------------------------------------------------

    def _add_output(self, item: Item) -> None:
        call_id = _text(item, "call_id" if item.get("call_id") else "id")
        if self._turn is not None:
            self._turn.is_answered = True
        call_id = self.echoed.detach(self._shell_calls.get(call_id, call_id))
        self.messages.append(tool_message(call_id, _chat_content(item.get("output"))))

    def _add_tools(self, item: Item) -> None:
        self._tools.add(item.get("tools"))

    def _uid_of(self, item: Item) -> str | None:
        item_id = item.get("id")
        return self.echoed.note(item_id) if isinstance(item_id, str) else None


def _unreadable(kind: object) -> str:
    what_to_do = NOT_STORED if kind == "item_reference" else "leave it out, or send it as a message"
    return f"the input has an item of type {str(kind)[:40]}, which this gateway cannot read; {what_to_do}"


def _text(item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{item.get('type') or 'an item'}: {name} must be a text")
    return value


def _function_name(item: Item) -> str:
    namespace = item.get("namespace")
    return function_name(_text(item, "name"), namespace if isinstance(namespace, str) else None)


def _joined_text(content: object) -> str:
    """The text of what a model wrote, which is text or a list of texts and refusals."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest("the content of an item must be a text or a list")
    return _part_text(content[0]) if len(content) == 1 else "".join(map(_part_text, content))


def _part_text(part: object) -> str:
    if isinstance(part, dict):
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if isinstance(text, str):
            return text
    raise BadRequest("what the assistant wrote must consist of texts")


def _chat_content(content: object) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("the content of an item must be a text or a list")
    if len(content) == 1 and isinstance(part := content[0], dict) and part.get("type") == "input_text":
        return _part_text(part)  # the usual case
    return joined_parts([_chat_part(part) for part in content])


def _chat_part(part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise BadRequest("every part of a content must be an object with a type")
    if kind in TEXT_PARTS:
        return text_part(_part_text(part))
    if kind == "input_image" and isinstance(url := part.get("image_url"), str):
        return image_part(url)
    if kind == "input_file" and isinstance(data := part.get("file_data"), str):
        name = part.get("filename")
        return {"type": "file", "file": {"file_data": data, "filename": name} if name else {"file_data": data}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise BadRequest(
        f"this gateway cannot read a part of type {kind[:40]} here; images and files must be in the request"
    )
