"""The gateway's OpenAPI document: FastAPI's, completed by the model calls, which FastAPI does not serve."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from stepwell.access.route_table import ROOTS, TRAJECTORY_ROOT, UNRECORDED_ROOTS
from stepwell.gateway.dialects.dialect import PLACE, Dialect, TokenCounter

TEXT: dict[str, Any] = {"type": "string"}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {"message": TEXT, "type": TEXT, "param": {}, "code": {}},
        }
    },
}
UIDS: list[dict[str, Any]] = [
    {"name": name, "in": "path", "required": True, "schema": TEXT} for name in ("trajectory_uid", "prompt_uid")
]
CALL_HEADERS = {
    "Idempotency-Key": "Calls of one trajectory that carry the same key are one call, and one step.",
    "x-stepwell-capture": "off, with a control key or a runner's key: the call is answered and not recorded.",
    "x-stepwell-call": "task or side, with a control key: whether this call belongs to the task.",
}


def openapi_document(schema: dict[str, Any], dialects: Iterable[Dialect]) -> bytes:
    """FastAPI's own document, with the agents' calls, keys and errors."""
    dialects = tuple(dialects)
    calls = [(dialect, path) for dialect in dialects for path in dialect.paths]
    counters = [dialect.token_counter for dialect in dialects if dialect.token_counter is not None]
    in_trajectory, in_session, unrecorded = f"{TRAJECTORY_ROOT}/v1", ROOTS[0], UNRECORDED_ROOTS[0]
    made = [
        *((in_trajectory, path, _operation(dialect, path)) for dialect, path in calls),
        *((in_session, path, _session_operation(dialect, path)) for dialect, path in calls),
        *((unrecorded, path, _unrecorded_operation(dialect, path)) for dialect, path in calls),
        *((in_trajectory, one.path, _count_operation(one, UIDS)) for one in counters),
        *((in_session, one.path, _count_operation(one, [])) for one in counters),
    ]
    paths = {**schema["paths"], **{f"{root}/{_shown(path)}": {"post": operation} for root, path, operation in made}}
    for path_item in paths.values():
        for operation in path_item.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = {"description": "Refused, with the reason", "content": json_content(ERROR)}
    components = dict(schema.get("components", {}))
    headers = {dialect.key_header.decode() for dialect in dialects} - {"authorization"}
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        **{name: {"type": "apiKey", "in": "header", "name": name} for name in sorted(headers)},
    }
    return orjson.dumps({**schema, "paths": paths, "components": components, "security": [{"key": []}]})


def json_content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _shown(path: str) -> str:
    """A path template as OpenAPI writes it."""
    return PLACE.sub(r"{\1}", path)


def _names(path: str) -> list[dict[str, Any]]:
    """The parameters that a path template names."""
    return [{"name": place[1], "in": "path", "required": True, "schema": TEXT} for place in PLACE.finditer(path)]


def _of_url(dialect: Dialect, path: str) -> list[dict[str, Any]]:
    """The parameters of a call's own URL."""
    return [*_names(path), *({"name": name, "in": "query", "schema": what} for name, what in dialect.query.items())]


def _operation(dialect: Dialect, path: str) -> dict[str, Any]:
    headers = [
        {"name": name, "in": "header", "schema": TEXT, "description": text} for name, text in CALL_HEADERS.items()
    ]
    answers: dict[str, Any] = {
        "200": {
            "description": "The answer; server-sent events where stream is true",
            "content": {**json_content({"type": "object"}), "text/event-stream": {"schema": TEXT}},
        }
    }
    name = dialect.summary if path == dialect.paths[0] else f"{dialect.summary} {path}"
    return {
        "summary": dialect.summary,
        "description": dialect.description,
        "operationId": re.sub(r"\W", "_", name.lower()),
        "parameters": [*UIDS, *_of_url(dialect, path), *headers],
        "requestBody": {"required": True, "content": json_content(dialect.request_schema)},
        "responses": answers,
    }


def _session_operation(dialect: Dialect, path: str) -> dict[str, Any]:
    """The same without uids: the key and the conversation name the session."""
    operation = _operation(dialect, path)
    text = (
        "The name of the conversation; without it, it is told by what the messages continue. With the key of a runner "
        "or an operator it may name a trajectory, as `trajectory_uid/prompt_uid`."
    )
    header = {"name": "x-session-id", "in": "header", "schema": TEXT, "description": text}
    return {
        **operation,
        "summary": f"{dialect.summary}, of a session",
        "operationId": f"session_{operation['operationId']}",
        "parameters": [*operation["parameters"][len(UIDS) :], header],
    }


def _unrecorded_operation(dialect: Dialect, path: str) -> dict[str, Any]:
    operation = _operation(dialect, path)
    return {
        "summary": f"{dialect.summary}, unrecorded",
        "description": dialect.unrecorded_description,
        "operationId": re.sub(r"\W", "_", f"unrecorded_{path}"),
        **({"parameters": told} if (told := _of_url(dialect, path)) else {}),
        "requestBody": operation["requestBody"],
        "responses": operation["responses"],
    }


def _count_operation(counter: TokenCounter, uids: list[dict[str, Any]]) -> dict[str, Any]:
    where = "" if uids else "session_"
    return {
        "summary": counter.summary,
        "description": "An engine renders the prompt. Nothing is generated and nothing is recorded.",
        "operationId": re.sub(r"\W", "_", where + counter.path),
        "parameters": [*uids, *_names(counter.path)],
        "requestBody": {"required": True, "content": json_content(counter.request_schema)},
        "responses": {"200": {"description": "The number of tokens", "content": json_content({"type": "object"})}},
    }
