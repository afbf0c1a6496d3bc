import json
from typing import Any

import pytest
from stepwell.gateway.asgi import access_table

from rig.local_pool import LocalPool
from stepwell.access.access_keys import AccessKeys
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.app import GatewayApp
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.routes.operator_routes import openapi_document

METHODS = {"get", "post", "put", "delete", "patch"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    front = GatewayApp(
        pool=LocalPool(),
        engines=EngineFleet(["http://nowhere"]),
        tokenizer=BackgroundTokenizer("nowhere", lambda _: None),
        rewards=None,
        prompt_length=8,
        response_length=8,
        keys=AccessKeys([]),
    ).asgi()
    return dict(json.loads(openapi_document(front.app.openapi(), DIALECTS)))


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, made) for path, item in document["paths"].items() for method, made in item.items()]


def references(part: Any) -> list[str]:
    if isinstance(part, dict):
        named = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return named + [name for value in part.values() for name in references(value)]
    return [name for value in part for name in references(value)] if isinstance(part, list) else []


def test_it_has_openapis_shape(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    assert document["info"]["title"]
    assert document["info"]["version"]
    for path, method, operation in operations(document):
        assert path.startswith("/")
        assert method in METHODS
        assert operation["responses"], (path, method)
        for answer in operation["responses"].values():
            assert answer["description"]
        for parameter in operation.get("parameters", []):
            assert parameter["in"] in ("path", "query", "header")
            assert parameter["schema"] is not None


def test_every_name_in_a_path_is_a_parameter_and_the_reverse(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        named = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        told = [made for made in operation.get("parameters", []) if made["in"] == "path"]
        assert {made["name"] for made in told} == named, (path, method)
        assert all(made["required"] for made in told)


def test_operations_have_names_of_their_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    assert references(document)
    for reference in references(document):
        place: Any = document
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]


def test_every_path_is_in_the_table_of_who_may_call_what(document: dict[str, Any]) -> None:
    listed = {(route.method.lower(), route.path) for route in access_table(DIALECTS)}
    assert {(method, path) for path, method, _ in operations(document)} <= listed


def test_the_agents_calls_are_listed_with_what_they_take(document: dict[str, Any]) -> None:
    for call, needed in (("chat/completions", "messages"), ("completions", "prompt")):
        operation = document["paths"][f"/{{trajectory_uid}}/{{prompt_uid}}/v1/{call}"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["required"]) == {"model", needed}
        assert set(schema["required"]) <= set(schema["properties"])
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        headers = {made["name"] for made in operation["parameters"] if made["in"] == "header"}
        assert {"Idempotency-Key", "x-stepwell-call"} <= headers


def test_refusals_are_told_as_openais_errors_and_keys_are_asked_for(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        assert "422" not in operation["responses"], (path, method)
        schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        assert schema["properties"]["error"]["required"] == ["message", "type", "code"]
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
