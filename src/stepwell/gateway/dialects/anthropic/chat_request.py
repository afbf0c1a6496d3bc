"""A request to Anthropic's Messages API, as a chat request.

One rule for what is not known here: a field is ignored (metadata, service_tier, context_management and so on), because
clients send new ones with every release; a content block or a tool is refused, because the model would answer another
question than it was asked.

- Consecutive messages of one role are one message, as in Anthropic's API. Results of tools come first in it.
- A text is the same whether it comes as a string or as blocks, with or without cache_control. Texts of a user, of the
  system and of a tool's result are joined by line ends; those of the assistant, which are parts of one answer, by
  nothing.
- A line that Claude Code puts before its system prompt and that is different in every call is removed.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import orjson

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.chat_form import (
    EchoedSteps,
    StepSeal,
    assistant_message,
    function_tool,
    image_part,
    joined_parts,
    text_part,
    tool_call,
    tool_message,
)
from stepwell.gateway.dialects.dialect import PromptTexts
from stepwell.gateway.dialects.openai import TEXT_READ

SAME_NAME = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BILLING_LINE = "x-anthropic-billing-header:"
"""How the changing line in Claude Code's system prompt begins."""
Content: TypeAlias = str | list[Any]
"""One text, or blocks."""
ROLES = ("user", "assistant", "system")
ERROR = "Error: "
"""Put before the result of a tool that failed, unless the result says so itself: chat has no field for it."""
MALFORMED = "malformed"
"""The only key of a tool's input that stands for arguments that were no JSON object; its value is their text."""
PREFILL = {"add_generation_prompt": False, "continue_final_message": True}
"""The switches for the engine if the last message is the assistant's: the answer continues it."""


class TranslatedRequest(NamedTuple):
    request: dict[str, Any]
    """The request in chat's form."""
    echoed: tuple[str, ...]
    """The echoed steps; this field and those that follow are as in ModelCall."""
    texts: PromptTexts
    malformed_history: int


def translate_request(request: Mapping[str, Any], seal: StepSeal) -> TranslatedRequest:
    """BadRequest says what is wrong. Parts of `request` are used in the result."""
    conversation = Conversation(seal)
    if (system := request.get("system")) is not None:
        conversation.add("system", _content(system, "system"))
    for role, content in _turns(request.get("messages")):
        conversation.add(role, content)
    messages = conversation.messages
    if not messages:
        raise BadRequest("the messages have no text")
    translated = {**read_fields(request), "messages": messages}
    if messages[-1]["role"] == "assistant":
        translated |= PREFILL
    return TranslatedRequest(
        translated, conversation.echoed.uids(), conversation.prompt_texts(), conversation.malformed_calls
    )


def _turns(messages: object) -> Iterator[tuple[str, Content]]:
    """The role and the content of each turn: consecutive messages of one role."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    turn: str = ""
    content: Content = ""
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise BadRequest(f"messages.{place}: every message must be an object with the role user or assistant")
        said = _content(message.get("content"), "messages.content")
        if role == turn:
            content = [*_as_blocks(content), *_as_blocks(said)]
            continue
        if turn:
            yield turn, content
        turn, content = role, said
    yield turn, content


def _content(content: object, where: str) -> Content:
    """A text is mostly all there is, and is not looked at block by block."""
    if isinstance(content, str):
        return content
    blocks = require_list(content, where)
    for block in blocks:
        if not isinstance(block, dict):
            raise BadRequest(f"{where}: every block must be an object")
    return _block_text(blocks[0]) if len(blocks) == 1 and blocks[0].get("type") == "text" else blocks


def _as_blocks(content: Content) -> list[Any]:
    return [text_part(content)] if isinstance(content, str) else content


class Conversation:
    """The messages in chat's form, and what was found in them."""

    def __init__(self, seal: StepSeal) -> None:
        self.messages: list[dict[str, Any]] = []
        self.echoed = EchoedSteps(seal)
        self.malformed_calls = 0
        self._last_user_text = ""

    def add(self, role: str, content: Content) -> None:
        if role == "system":
            self._add_system(_as_blocks(content))
        elif not isinstance(content, str):
            self._add_user(content) if role == "user" else self._add_assistant(content)
        else:
            self.messages.append({"role": role, "content": content})
            if role == "user" and content:
                self._last_user_text = content

    def prompt_texts(self) -> PromptTexts:
        """The user's last text counts, not the whole message: harnesses put reminders before it."""
        first = self.messages[0]
        system = first["content"] if first["role"] == "system" else ""
        return PromptTexts(system[:TEXT_READ].lstrip(), self._last_user_text[:TEXT_READ].lstrip())

    def _add_system(self, blocks: list[Any]) -> None:
        texts = [_without_billing(_block_text(block)) for block in blocks]
        text = "\n".join(text for text in texts if text)
        if text and self.messages and self.messages[-1]["role"] == "system":
            self.messages[-1]["content"] += f"\n{text}"
        elif text:
            self.messages.append({"role": "system", "content": text})

    def _add_user(self, blocks: list[Any]) -> None:
        parts, results = list[dict[str, Any]](), 0
        for block in blocks:
            if block.get("type") == "tool_result":
                results += 1
                parts += self._add_result(block)
            else:
                parts.append(part := _part(block))
                self._last_user_text = part.get("text") or self._last_user_text
        if parts or not results:
            self.messages.append({"role": "user", "content": joined_parts(parts)})

    def _add_result(self, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns its images: they come with the user's message, because few templates show those of a tool."""
        call_id = require_text(block.get("tool_use_id"), "tool_result.tool_use_id")
        content = block.get("content")
        parts = [] if content is None else list(map(_part, _as_blocks(_content(content, "tool_result.content"))))
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if block.get("is_error") is True and not text.lower().startswith("error"):
            text = ERROR + text
        self.messages.append(tool_message(self.echoed.detach(call_id), text))
        return [part for part in parts if part["type"] != "text"]

    def _add_assistant(self, blocks: list[Any]) -> None:
        texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
        for block in blocks:
            match block.get("type"):
                case "text":
                    texts.append(_block_text(block))
                case "thinking":
                    thoughts.append(require_text(block.get("thinking"), "thinking.thinking"))
                    self._note(block.get("signature"))
                case "redacted_thinking":  # of another server: nobody here can read it
                    self._note(block.get("data"))
                case "tool_use":
                    calls.append(self._tool_call(block))
                case _:
                    raise BadRequest(f"content blocks of type {shown_type(block)} are not supported")
        self.messages.append(assistant_message("".join(texts), "".join(thoughts), calls))

    def _tool_call(self, block: Mapping[str, Any]) -> dict[str, Any]:
        call_id = self.echoed.detach(require_text(block.get("id"), "tool_use.id"))
        name, given = require_text(block.get("name"), "tool_use.name"), block.get("input", {})
        if not isinstance(given, dict):
            given = {MALFORMED: given}
        self.malformed_calls += given.keys() == {MALFORMED}
        try:
            return tool_call(call_id, name, orjson.dumps(given).decode())
        except orjson.JSONEncodeError as failure:  # orjson reads deeper nesting than it writes
            raise BadRequest(f"the input of a tool_use cannot be passed on: {failure}") from None

    def _note(self, text: object) -> None:
        if isinstance(text, str):
            self.echoed.note(text)


def _block_text(block: Mapping[str, Any]) -> str:
    if block.get("type") != "text":
        raise BadRequest(f"a block of type {shown_type(block)} cannot stand here; only text can")
    return require_text(block.get("text"), "text.text")


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_LINE) else text


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block of a user or of a tool's result."""
    match block.get("type"):
        case "text":
            return text_part(_block_text(block))
        case "image":
            return image_part(_image_url(require_object(block.get("source"), "image.source")))
        case "document":
            return text_part(_document_text(require_object(block.get("source"), "document.source")))
    raise BadRequest(f"content blocks of type {shown_type(block)} are not supported")


def _image_url(source: Mapping[str, Any]) -> str:
    match source.get("type"):
        case "base64":
            media_type = require_text(source.get("media_type"), "image.source.media_type")
            return f"data:{media_type};base64,{require_text(source.get('data'), 'image.source.data')}"
        case "url":
            return require_text(source.get("url"), "image.source.url")
    raise BadRequest(f"images with a source of type {shown_type(source)} are not supported")


def _document_text(source: Mapping[str, Any]) -> str:
    match source.get("type"):
        case "text":
            return require_text(source.get("data"), "document.source.data")
        case "content":
            return "\n".join(map(_block_text, _as_blocks(_content(source.get("content"), "document.source.content"))))
    raise BadRequest(f"documents with a source of type {shown_type(source)} are not supported")


def read_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same in chat's form, without the messages."""
    fields = {name: request[name] for name in SAME_NAME if request.get(name) is not None}
    if stops := request.get("stop_sequences"):
        fields["stop"] = [require_text(stop, "stop_sequences") for stop in require_list(stops, "stop_sequences")]
    if tools := request.get("tools"):
        fields["tools"] = [_tool(tool, f"tools.{place}") for place, tool in enumerate(require_list(tools, "tools"))]
        if (choice := request.get("tool_choice")) is not None:
            fields |= _tool_choice(require_object(choice, "tool_choice"))
    if (thinking := request.get("thinking")) is not None:
        fields["include_reasoning"] = require_object(thinking, "thinking").get("type") != "disabled"
    if (wanted := _output_format(request)) is not None:
        fields["response_format"] = wanted
    return fields


def _tool(tool: object, where: str) -> dict[str, Any]:
    tool = require_object(tool, where)
    name, schema = require_text(tool.get("name"), f"{where}.name"), tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(
            f"{where}: the tool {name[:80]} has no input_schema; tools that Anthropic runs or defines "
            f"(type {shown_type(tool)}) are not supported"
        )
    description = tool.get("description")
    if description is not None:
        description = require_text(description, f"{where}.description")
    return function_tool(name, description, schema, strict=tool.get("strict") is True)


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if (kind := choice.get("type")) == "tool":
        fields["tool_choice"] = {
            "type": "function",
            "function": {"name": require_text(choice.get("name"), "tool_choice.name")},
        }
    elif isinstance(kind, str) and kind in TOOL_CHOICES:
        fields["tool_choice"] = TOOL_CHOICES[kind]
    else:
        raise BadRequest(f"tool_choice.type must be auto, any, tool or none, not {shown_type(choice)}")
    if choice.get("disable_parallel_tool_use") is True:
        fields["parallel_tool_calls"] = False
    return fields


def _output_format(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Structured output. The field was renamed: both names are read."""
    config = request.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else None
    wanted = request.get("output_format") if wanted is None else wanted
    if wanted is None:
        return None
    wanted = require_object(wanted, "output_config.format")
    if wanted.get("type") != "json_schema":
        raise BadRequest(f"output_config.format.type must be json_schema, not {shown_type(wanted)}")
    schema = require_object(wanted.get("schema"), "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def require_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string")
    return value


def require_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list")
    return value


def require_object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object")
    return value


def shown_type(value: Mapping[str, Any]) -> str:
    return str(value.get("type"))[:40]
