from typing import Any

import pytest

from stepwell.errors import BadRequest
from tests.unit.gateway.dialects.responses.asking_responses import Json, ask, user

F: Json = {"type": "function", "name": "f", "description": "Does f.", "parameters": {"type": "object"}, "strict": None}
PATCH: Json = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x: Y"}}
CRM: Json = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [F, {**PATCH, "name": "note"}]}
SHELL: Json = {"type": "local_shell"}


def functions(*tools: Any, **fields: Any) -> dict[str, Json]:
    offered = ask(tools=list(tools), **fields).request.get("tools", [])
    return {tool["function"]["name"]: tool["function"] for tool in offered}


def test_every_tool_that_the_client_runs_is_a_function() -> None:
    offered = functions(F, PATCH, CRM, SHELL)
    assert list(offered) == ["f", "patch", "crm__f", "crm__note", "local_shell"]
    assert offered["f"] == {"name": "f", "description": "Does f.", "parameters": {"type": "object"}}
    assert offered["patch"]["description"] == "The input follows this lark grammar:\nx: Y"
    assert offered["patch"]["parameters"]["required"] == ["input"]
    assert offered["crm__f"]["description"] == "Customers.\n\nDoes f."
    assert offered["local_shell"]["parameters"]["required"] == ["command"]


def test_tools_that_run_elsewhere_are_left_out() -> None:
    assert list(functions({"type": "web_search"}, F, {"type": "mcp", "server_label": "x"}, {"type": "new"})) == ["f"]
    request = ask(tools=[{"type": "web_search"}], tool_choice="auto", parallel_tool_calls=False).request
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(request)


def test_tools_of_an_item_are_offered_too_and_only_once() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [F, SHELL]}
    request = ask(user(), item, tools=[F]).request
    assert [tool["function"]["name"] for tool in request["tools"]] == ["f", "local_shell"]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "function", "name": "f", "namespace": "crm"}, "crm__f"),
    ],
)
def test_a_choice_names_the_function(choice: Any, chosen: str) -> None:
    given = ask(tools=[F, PATCH, CRM, SHELL], tool_choice=choice).request["tool_choice"]
    assert given == (chosen if isinstance(choice, str) else {"type": "function", "function": {"name": chosen}})


def test_only_allowed_tools_are_offered() -> None:
    allowed = [{"type": "function", "name": "f"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    request = ask(tools=[F, PATCH, SHELL], tool_choice=choice).request
    assert ([tool["function"]["name"] for tool in request["tools"]], request["tool_choice"]) == (["f"], "required")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": [F], "tool_choice": {"type": "web_search"}}, "cannot offer: web_search"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "cannot offer: g"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools", "tools": []}}, "a mode"),
        ({"tools": [F], "tool_choice": 5}, "consist of objects"),
        ({"tools": [F, {**PATCH, "name": "f"}]}, "two tools are named f"),
        ({"tools": [{"type": "function"}]}, "must have a name"),
        ({"tools": {"f": F}}, "must be a list"),
        ({"tools": ["f"]}, "consist of objects"),
        ({"tools": [{"type": "namespace", "name": "crm"}]}, "a list of tools"),
    ],
)
def test_tools_that_make_no_sense_are_refused(fields: Json, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        ask(**fields)
