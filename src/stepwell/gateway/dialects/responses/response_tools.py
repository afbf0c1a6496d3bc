"""The tools of a request as chat functions, and back.

- A custom tool is a function with one text, `input`. Its grammar is added to its description; no engine enforces it.
- A tool of a namespace is a function whose name begins with the namespace's.
- `local_shell` is a function of that name.
- All other tools run at OpenAI (web search, code interpreter and so on) or are unknown. They are left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.chat_form import function_tool

LOCAL_SHELL: Literal["local_shell"] = "local_shell"
SHELL_DESCRIPTION = "Runs a command in the user's local shell and returns its output."
SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The command and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}
CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class ClientTool(NamedTuple):
    """A tool as the client names it."""

    kind: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None


class ClientTools:
    """The tools of one request."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        """The tools in chat's form."""
        self._by_name: dict[str, ClientTool] = {}
        """The tools by the function's name."""

    def named(self, function: str) -> ClientTool:
        """The tool behind a function. A function that nobody offered is passed on under its own name."""
        return self._by_name.get(function) or ClientTool("function", function)

    def offers(self, function: str) -> bool:
        return function in self._by_name

    def add(self, tools: object) -> None:
        if not isinstance(tools, list):
            raise BadRequest("tools must be a list")
        for tool in tools:
            self._add_tool(_object(tool))

    def keep(self, names: Iterable[str]) -> None:
        """Leave out all functions but these."""
        kept = set(names)
        self.functions = [function for function in self.functions if function["function"]["name"] in kept]

    def _add_tool(self, tool: Mapping[str, Any]) -> None:
        kind = tool.get("type")
        if kind == "namespace":
            self._add_namespace(tool)
        elif kind in ("function", "custom"):
            self._add_named(tool, kind, None, "")
        elif kind == LOCAL_SHELL:
            self._offer(ClientTool(LOCAL_SHELL, LOCAL_SHELL), SHELL_DESCRIPTION, SHELL_PARAMETERS)

    def _add_namespace(self, group: Mapping[str, Any]) -> None:
        tools = group.get("tools")
        if not isinstance(tools, list):
            raise BadRequest("a namespace must have a list of tools")
        for tool in map(_object, tools):
            kind = tool.get("type")
            if kind in ("function", "custom"):
                self._add_named(tool, kind, _name(group), _text(group, "description"))

    def _add_named(
        self, tool: Mapping[str, Any], kind: Literal["function", "custom"], namespace: str | None, intro: str
    ) -> None:
        description = "\n\n".join(filter(None, (intro, _text(tool, "description"), _grammar(tool))))
        parameters = CUSTOM_PARAMETERS if kind == "custom" else tool.get("parameters")
        strict = kind == "function" and bool(tool.get("strict"))
        self._offer(ClientTool(kind, _name(tool), namespace), description, parameters, strict=strict)

    def _offer(self, tool: ClientTool, description: str, parameters: Any, *, strict: bool = False) -> None:
        name = function_name(tool.name, tool.namespace)
        if (known := self._by_name.get(name)) == tool:
            return
        if known is not None:
            raise BadRequest(f"two tools are named {name}")
        self._by_name[name] = tool
        self.functions.append(function_tool(name, description or None, parameters, strict=strict))


def function_name(name: str, namespace: str | None) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def chosen_tool(choice: object, tools: ClientTools) -> Any:
    """A request's tool_choice as chat has it; None if it has none. Allowed tools leave only those in `tools`."""
    if choice is None or isinstance(choice, str):
        return choice
    named = _object(choice)
    if named.get("type") != "allowed_tools":
        return {"type": "function", "function": {"name": _chosen_function(named, tools)}}
    allowed, mode = named.get("tools"), named.get("mode")
    if not isinstance(allowed, list) or mode not in ("auto", "required"):
        raise BadRequest("tool_choice: allowed_tools has a list of tools and a mode, which is auto or required")
    functions = map(_function_of, map(_object, allowed))
    tools.keep(function for function in functions if tools.offers(function))
    return mode


def _chosen_function(choice: Mapping[str, Any], tools: ClientTools) -> str:
    function = _function_of(choice)
    if not tools.offers(function):
        raise BadRequest(f"tool_choice names a tool that this gateway cannot offer: {function[:80] or 'none'}")
    return function


def _function_of(tool: Mapping[str, Any]) -> str:
    if tool.get("type") == LOCAL_SHELL:
        return LOCAL_SHELL
    return function_name(_text(tool, "name") or _text(tool, "type"), _text(tool, "namespace"))


def _grammar(tool: Mapping[str, Any]) -> str:
    form = tool.get("format")
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return ""
    return f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"


def _name(tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest("every tool must have a name")
    return name


def _text(tool: Mapping[str, Any], field: str) -> str:
    value = tool.get(field)
    return value if isinstance(value, str) else ""


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest("tools and tool_choice consist of objects")
    return value
