"""The output items of a response: one for the reasoning, one for the text, one for each call.

- The ids of all items, the ids of calls and `encrypted_content` end with the sealed uid of the step.
- For a custom tool the model is offered a function and writes {"input": "..."}; the client gets the text. It is decoded
  as it arrives, and does not depend on how the arguments are cut into pieces. Arguments that do not begin like that are
  the input as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson

from stepwell.gateway.dialects.chat_form import SEPARATOR
from stepwell.gateway.dialects.openai_choices import read_function, read_reasoning, read_tool_calls
from stepwell.gateway.dialects.responses_input import LOCAL_SHELL, ClientTool, ClientTools, encode_reasoning
from stepwell.wire.openai import read_text

OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
OPENING_LENGTH = 64
"""Arguments whose first characters, so many, do not match are taken as they are."""
BODY = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""A JSON string up to its closing quote, or as far as it has arrived."""
ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL
)
LONGEST_ESCAPE = 12
"""Two halves of a character."""
LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


class CustomInput:
    """Decodes one call's arguments."""

    __slots__ = ("_held", "_is_closed", "_is_inside", "_is_plain")

    def __init__(self) -> None:
        self._held = ""
        """The text that has arrived and is not decoded yet."""
        self._is_inside = False
        """Within the string."""
        self._is_plain = False
        self._is_closed = False

    def feed(self, piece: str) -> str:
        """The text that `piece` makes certain."""
        if self._is_plain:
            return piece
        if self._is_closed:
            return ""
        self._held += piece
        if not self._is_inside and not self._open():
            return self._release() if self._is_plain else ""
        return self._decode()

    def end(self) -> str:
        """The rest of arguments that have ended, whole or not."""
        if self._is_closed:
            return ""
        rest = self._release()
        return ESCAPE.sub(_unescape, rest) if self._is_inside else rest

    def _open(self) -> bool:
        opening = OPENING.match(self._held[:OPENING_LENGTH])
        if opening is not None:
            self._held, self._is_inside = self._held[opening.end() :], True
        elif len(self._held) >= OPENING_LENGTH:
            self._is_plain = True
        return self._is_inside

    def _decode(self) -> str:
        body = BODY.match(self._held)
        assert body is not None
        text, end = body.group(), body.end()
        if self._held[end : end + 1] == '"':
            self._is_closed, self._held = True, ""
        else:
            certain = _certain(text)
            text, self._held = text[:certain], self._held[certain:]
        return ESCAPE.sub(_unescape, text) if "\\" in text else text

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held


def custom_input(arguments: str) -> str:
    """The input that whole arguments hold."""
    decoder = CustomInput()
    return decoder.feed(arguments) + decoder.end()


def _certain(text: str) -> int:
    """How many characters at the beginning mean the same whatever follows."""
    if "\\" in text[-LONGEST_ESCAPE:]:
        for escape in ESCAPE.finditer(text):
            if escape.start() > len(text) - LONGEST_ESCAPE:
                return escape.start()
    return len(text)


def _unescape(escape: re.Match[str]) -> str:
    high, low, code, letter = escape.groups()
    if high is not None:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if code is not None:
        value = int(code, 16)
        return "\ufffd" if 0xD800 <= value <= 0xDFFF else chr(value)
    return LETTERS.get(letter, escape.group())


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputContext(NamedTuple):
    """The part of a request that its output items depend on."""

    sealed: str
    """The sealed uid of the step."""
    tools: ClientTools
    shows_summary: bool
    """The client asked for a summary of the reasoning. It gets the reasoning's text there, else as content."""

    def attach_seal(self, text: str) -> str:
        return text + SEPARATOR + self.sealed


class PartEvents(NamedTuple):
    """The part of an item that holds its text, and the events that open and close it."""

    kind: str
    index_field: str
    added: str = "response.content_part.added"
    done: str = "response.content_part.done"


class TextEvents(NamedTuple):
    """The events that carry the text of an item."""

    delta: str
    done: str
    done_field: str = "text"
    part: PartEvents | None = None


MESSAGE_EVENTS = TextEvents(
    "response.output_text.delta", "response.output_text.done", part=PartEvents("output_text", "content_index")
)
REASONING_EVENTS = TextEvents(
    "response.reasoning_text.delta", "response.reasoning_text.done", part=PartEvents("reasoning_text", "content_index")
)
SUMMARY_EVENTS = TextEvents(
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    part=PartEvents(
        "summary_text", "summary_index", "response.reasoning_summary_part.added", "response.reasoning_summary_part.done"
    ),
)
FUNCTION_EVENTS = TextEvents(
    "response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments"
)
CUSTOM_EVENTS = TextEvents("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "input")


@dataclass(frozen=True, slots=True)
class ReasoningOutput:
    id: str
    context: OutputContext

    @property
    def events(self) -> TextEvents:
        return SUMMARY_EVENTS if self.context.shows_summary else REASONING_EVENTS

    def value(self, text: str, status: ItemStatus) -> dict[str, Any]:
        context = self.context
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "summary": [], "status": status}
        if status != "in_progress":
            if context.shows_summary:
                item["summary"] = [{"type": "summary_text", "text": text}]
            else:
                item["content"] = [{"type": "reasoning_text", "text": text}]
            item["encrypted_content"] = context.attach_seal(encode_reasoning(text))
        return item


@dataclass(frozen=True, slots=True)
class MessageOutput:
    id: str
    events: TextEvents = MESSAGE_EVENTS

    def value(self, text: str, status: ItemStatus) -> dict[str, Any]:
        content = [] if status == "in_progress" else [output_part("output_text", text)]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class CallForm(NamedTuple):
    """How the call of one kind of tool is written."""

    prefix: str
    type: str
    text_field: str
    events: TextEvents | None


CALL_FORMS: Mapping[str, CallForm] = {
    "function": CallForm("fc", "function_call", "arguments", FUNCTION_EVENTS),
    "custom": CallForm("ctc", "custom_tool_call", "input", CUSTOM_EVENTS),
    LOCAL_SHELL: CallForm("lsh", "local_shell_call", "action", None),
}


@dataclass(frozen=True, slots=True)
class CallOutput:
    id: str
    call_id: str
    tool: ClientTool

    @property
    def is_custom(self) -> bool:
        return self.tool.kind == "custom"

    @property
    def events(self) -> TextEvents | None:
        """None: it is sent whole."""
        return CALL_FORMS[self.tool.kind].events

    def value(self, text: str, status: ItemStatus) -> dict[str, Any]:
        """A command that cannot be read is a plain function call, which no client runs in a shell."""
        form = CALL_FORMS[self.tool.kind]
        if self.tool.kind == LOCAL_SHELL:
            if (action := shell_action(text)) is not None:
                return {"id": self.id, "type": form.type, "status": status, "call_id": self.call_id, "action": action}
            form = CALL_FORMS["function"]
        item: dict[str, Any] = {"id": self.id, "type": form.type, "status": status, "call_id": self.call_id}
        item |= {"name": self.tool.name, form.text_field: text}
        return item if self.tool.namespace is None else {**item, "namespace": self.tool.namespace}


OutputItem: TypeAlias = ReasoningOutput | MessageOutput | CallOutput
"""`value` is the item as the client sees it when it has this text."""


def new_reasoning(context: OutputContext, index: int) -> ReasoningOutput:
    return ReasoningOutput(context.attach_seal(f"rs_{index}"), context)


def new_message(context: OutputContext, index: int) -> MessageOutput:
    return MessageOutput(context.attach_seal(f"msg_{index}"))


def new_call(context: OutputContext, index: int, engine_id: str, name: str) -> CallOutput:
    tool = context.tools.named(name)
    item_id = context.attach_seal(f"{CALL_FORMS[tool.kind].prefix}_{index}")
    return CallOutput(item_id, context.attach_seal(engine_id or f"call_{index}"), tool)


def output_part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


def whole_output(context: OutputContext, message: Mapping[str, Any], last_status: ItemStatus) -> list[dict[str, Any]]:
    """The items of an answer that is not streamed. An answer without anything is an empty text."""
    texts: list[tuple[OutputItem, str]] = []
    if thought := read_reasoning(message):
        texts.append((new_reasoning(context, 0), thought))
    calls = read_tool_calls(message)
    content = read_text(message.get("content")) or ""
    if content or not (texts or calls):
        texts.append((new_message(context, len(texts)), content))
    for call in calls:
        name, arguments = read_function(call)
        item = new_call(context, len(texts), read_text(call.get("id")) or "", name)
        texts.append((item, custom_input(arguments) if item.is_custom else arguments))
    last = len(texts) - 1
    return [item.value(text, last_status if i == last else "completed") for i, (item, text) in enumerate(texts)]


def shell_action(arguments: str) -> dict[str, Any] | None:
    """The action of a local shell call; None if the arguments are none."""
    try:
        given = orjson.loads(arguments)
        command = given["command"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        return None
    env = given.get("env")
    return {
        "type": "exec",
        "command": command,
        "env": {name: str(value) for name, value in env.items()} if isinstance(env, dict) else {},
        "timeout_ms": timeout if type(timeout := given.get("timeout_ms")) is int else None,
        "user": None,
        "working_directory": read_text(given.get("working_directory")),
    }
