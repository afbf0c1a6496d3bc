"""Writes docs/api.md from the gateway's own OpenAPI document. A test keeps it up to date."""

import json
import re
from pathlib import Path
from typing import Any, cast

from stepwell.gateway.asgi import access_table

from stepwell.access.access_keys import AccessKeys
from stepwell.access.route_table import Route
from stepwell.common.tokenizers import BackgroundTokenizer, load_tokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.app import GatewayApp
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.routes.operator_routes import openapi_document
from stepwell.pool.client import PoolClient

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# The gateway's API

Written by `scripts/api_docs.py` from `GET /openapi.json`. [gateway.md](gateway.md) explains the calls.

Below a trajectory, `/v1` may be left out or doubled; `/session/v1` is another name of `/v1`.
Errors are OpenAI error objects:
`{"error": {"message", "type", "param", "code"}}`; those of messages are Anthropic's:
`{"type": "error", "error": {"type", "message"}}`. The key goes into the header `Authorization: Bearer KEY` or
`x-api-key: KEY`; a gateway started without `--control-keys` requires none. "Key" names the
[roles](operations/security.md#roles) that may call a route, beside `admin`; `trajectory` is the key of the trajectory
in the URL.
"""

Schema = dict[str, Any]
ACCESS = access_table(DIALECTS)


def document() -> Schema:
    """The OpenAPI document of a gateway that was never started."""
    front = GatewayApp(
        pool=cast("PoolClient", None),
        engines=EngineFleet([]),
        tokenizer=BackgroundTokenizer("", load_tokenizer),
        rewards=None,
        prompt_length=1,
        response_length=1,
        keys=AccessKeys(()),
    ).asgi()
    return cast("Schema", json.loads(openapi_document(front.app.openapi(), DIALECTS)))


def page(document: Schema) -> str:
    schemas: Schema = document["components"]["schemas"]
    sections = [
        _section(method.upper(), path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return HEAD + "".join(sections)


def _section(method: str, path: str, operation: Schema, schemas: Schema) -> str:
    parts = [
        f"\n## {method} {path}",
        f"{operation['description'].rstrip('.')}. Key: {key_of(ACCESS.find(method, path))}.",
    ]
    if named := [p for p in operation.get("parameters", ()) if p["in"] != "path"]:
        parts.append(table("parameter", [(p["name"], p["schema"], p.get("description", "")) for p in named], schemas))
    if body := operation.get("requestBody"):
        parts.append(fields_table("field", body, schemas))
    if answer := fields_table("answer", operation["responses"]["200"], schemas):
        parts.append(answer)
    return "\n\n".join(parts) + "\n"


def key_of(route: Route) -> str:
    return "none" if route.is_open else ", ".join(sorted(route.roles)) or "admin"


def fields_table(title: str, holder: Schema, schemas: Schema) -> str:
    schema = _resolved(holder.get("content", {}).get("application/json", {}).get("schema", {}), schemas)
    needed = schema.get("required", ()) if title == "field" else ()
    rows = [
        (f"**{name}**" if name in needed else name, value, value.get("description", ""))
        for name, value in schema.get("properties", {}).items()
    ]
    return table(title, rows, schemas) if rows else ""


def table(title: str, rows: list[tuple[str, Schema, str]], schemas: Schema) -> str:
    lines = [f"| {title} | type | |", "|---|---|---|"]
    lines += [f"| {name} | {_kind(schema, schemas)} | {' '.join(text.split())} |" for name, schema, text in rows]
    return "\n".join(lines)


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    """The schema itself, where it is a reference or an optional one."""
    for choice in schema.get("anyOf", ()):
        if "$ref" in choice:
            schema = choice
    return cast("Schema", schemas[schema["$ref"].rpartition("/")[2]]) if "$ref" in schema else schema


def _kind(schema: Schema, schemas: Schema) -> str:
    if "$ref" in schema:
        return _kind(_resolved(schema, schemas), schemas)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(choice, schemas) for choice in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), schemas)}"
    if schema.get("type") == "object" and "properties" in schema:
        return "{" + ", ".join(schema["properties"]) + "}"
    return re.sub("^$", "any", str(schema.get("type", "")))


if __name__ == "__main__":
    PAGE.write_text(page(document()))
    print(f"wrote {PAGE}")
