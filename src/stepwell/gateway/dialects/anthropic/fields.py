"""The fields of a request to Anthropic's Messages API beside its messages, and how values of a wrong type are refused.

Fields that are not listed here are ignored: metadata, service_tier, context_management and so on.
"""

from collections.abc import Mapping
from typing import Any

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.chat_form import function_tool

SAME_NAME = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


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
