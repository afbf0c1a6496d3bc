"""docs/reference/dashboard-api.md: the dashboard's HTTP calls, from its own OpenAPI document."""

from typing import Any, cast

from api_docs import Schema, fields_table, table
from fastapi import FastAPI

from stepwell.dashboard.routes import api_router

HEAD = """# The dashboard's HTTP API

Written by `scripts/reference.py` from the code. The page and `stepwell status` use it; scripts can too. The key goes
into the header `Authorization: Bearer KEY`. Answers are JSON, errors `{"error": {"message"}}`. Fields may be added.
"""


def page() -> str:
    document = _document()
    schemas: Schema = document["components"]["schemas"]
    return HEAD + "".join(
        _section(method.upper(), path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if path.startswith("/api/")
    )


def _document() -> Schema:
    """The OpenAPI document of routes that are never called."""
    app = FastAPI()
    app.include_router(api_router(cast("Any", None)))
    return app.openapi()


def _section(method: str, path: str, operation: Schema, schemas: Schema) -> str:
    parts = [f"\n## {method} {path}", str(operation["description"])]
    if named := operation.get("parameters"):
        rows = [(_name(p), p["schema"], p.get("description", p["schema"].get("description", ""))) for p in named]
        parts.append(table("parameter", rows, schemas))
    if body := operation.get("requestBody"):
        parts.append(fields_table("field", body, schemas))
    return "\n\n".join(parts) + "\n"


def _name(parameter: Schema) -> str:
    return f"**{parameter['name']}**" if parameter.get("required") else str(parameter["name"])
