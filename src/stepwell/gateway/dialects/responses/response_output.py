"""The output items of a response: one for the reasoning, one for the text, one for each call.

The ids of all items, the ids of calls and `encrypted_content` end with the sealed uid of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import orjson

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.chat_form import SEPARATOR
from stepwell.gateway.dialects.responses_input import LOCAL_SHELL, ClientTool, ClientTools, encode_reasoning
from stepwell.gateway.dialects.responses_output import custom_input
from stepwell.wire.openai import read_text

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


class OutputItem(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def events(self) -> TextEvents | None:
        """None: it is sent whole."""

    def value(self, text: str, status: ItemStatus) -> dict[str, Any]:
        """The item as the client sees it when it has this text."""


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
        "summary_text",
        "summary_index",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
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


@dataclass(frozen=True, slots=True)
class FunctionOutput:
    """A call of a function, or a call that a typed item cannot express."""

    id: str
    call_id: str
    tool: ClientTool
    events: TextEvents = FUNCTION_EVENTS

    def value(self, text: str, status: ItemStatus) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id}
        item |= {"name": self.tool.name, "arguments": text}
        return item if self.tool.namespace is None else {**item, "namespace": self.tool.namespace}


@dataclass(frozen=True, slots=True)
class CustomOutput:
    id: str
    call_id: str
    tool: ClientTool
    events: TextEvents = CUSTOM_EVENTS

    def value(self, text: str, status: ItemStatus) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": "custom_tool_call", "status": status, "call_id": self.call_id}
        item |= {"name": self.tool.name, "input": text}
        return item if self.tool.namespace is None else {**item, "namespace": self.tool.namespace}


@dataclass(frozen=True, slots=True)
class ShellOutput:
    id: str
    call_id: str
    tool: ClientTool
    events: TextEvents | None = None

    def value(self, text: str, status: ItemStatus) -> dict[str, Any]:
        """A command that cannot be read is a plain function call, which no client runs in a shell."""
        action = shell_action(text)
        if action is None:
            return FunctionOutput(self.id, self.call_id, self.tool).value(text, status)
        item = {"id": self.id, "type": "local_shell_call", "status": status, "call_id": self.call_id}
        return {**item, "action": action}


CALL_OUTPUTS: Mapping[str, tuple[str, type[FunctionOutput | CustomOutput | ShellOutput]]] = {
    "function": ("fc", FunctionOutput),
    "custom": ("ctc", CustomOutput),
    LOCAL_SHELL: ("lsh", ShellOutput),
}


def new_reasoning(context: OutputContext, index: int) -> ReasoningOutput:
    return ReasoningOutput(context.attach_seal(f"rs_{index}"), context)


def new_message(context: OutputContext, index: int) -> MessageOutput:
    return MessageOutput(context.attach_seal(f"msg_{index}"))


def new_call(context: OutputContext, index: int, engine_id: str, name: str) -> OutputItem:
    tool = context.tools.named(name)
    prefix, output = CALL_OUTPUTS[tool.kind]
    call_id = context.attach_seal(engine_id or f"call_{index}")
    return output(context.attach_seal(f"{prefix}_{index}"), call_id, tool)


def output_part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


def whole_output(context: OutputContext, message: Mapping[str, Any], last_status: ItemStatus) -> list[dict[str, Any]]:
    """The items of an answer that is not streamed. An answer without anything is an empty text."""
    texts: list[tuple[OutputItem, str]] = []
    if thought := read_text(message.get("reasoning")) or read_text(message.get("reasoning_content")):
        texts.append((new_reasoning(context, 0), thought))
    calls = read_calls(message)
    content = read_text(message.get("content")) or ""
    if content or not (texts or calls):
        texts.append((new_message(context, len(texts)), content))
    for call in calls:
        function = read_function(call)
        item = new_call(context, len(texts), read_text(call.get("id")) or "", read_text(function.get("name")) or "")
        arguments = read_text(function.get("arguments")) or ""
        texts.append((item, custom_input(arguments) if isinstance(item, CustomOutput) else arguments))
    last = len(texts) - 1
    return [item.value(text, last_status if i == last else "completed") for i, (item, text) in enumerate(texts)]


def read_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of an engine's message or delta."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise EngineUnavailable("the engine's answer has tool calls that are no objects")
    return calls


def read_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


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
