"""What can be asked of an HTTP surface: from its OpenAPI document, or by hand where there is none."""

import random
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rig.atropos.server import ENVIRONMENT, TRAINER, scored_group
from rig.hostile.json_values import Json, JsonMaker, Schema

OF_SEQUENCES: Mapping[str, Json] = {
    "advantages": [0.0, 0.0, 1.0, 1.0],
    "ref_logprobs": [0.0, 0.0, -1.0, -1.0],
    "messages": [{"role": "user", "content": "hello"}],
    "overrides": {"set_advantage_to_zero": True},
    "distill_token_ids": [[1], [2], [3], [4]],
    "distill_logprobs": [[0.0], [0.0], [0.0], [0.0]],
    "temperatures": 1.0,
    "untrainable": "greedy: temperature 0",
    "models": "tiny",
    "policy_versions": 0,
    "exactness": "engine",
}
OF_GROUPS: Mapping[str, Json] = {
    "generation_params": {"temperature": 1.0},
    "group_overrides": {"a": 1},
    "images": ["x"],
    "env_id": 0,
}
"""Further fields of scored groups."""
LEASES = ('[["data_pool","a-0"]]', '[["data_pool-9","live-a-0"]]', "[[]]", "{}", "[[1,2]]", '[["\\u0000","a"]]', "[1]")
METHODS = ("get", "post", "put", "delete", "patch", "head", "options")


class BodyMaker(Protocol):
    def __call__(self, chance: random.Random) -> Json:
        """A body that is right, or nearly."""


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    """With {names} in it."""
    body: BodyMaker | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    weight: int = 1
    """How often it is asked, compared with others."""


def openapi_operations(
    document: Mapping[str, Any], chance: random.Random, named: Mapping[str, Sequence[Json]]
) -> list[Operation]:
    """All operations of a document. Model calls are asked more often, because most of the code is behind them."""
    maker = JsonMaker(chance, document.get("components", {}).get("schemas", {}), named)
    return [
        Operation(
            method.upper(),
            path,
            _body_of(operation, maker),
            {given["name"]: given["schema"] for given in operation.get("parameters", ()) if given["in"] == "query"},
            weight=6 if path.endswith("completions") else 1,
        )
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    ]


def _body_of(operation: Mapping[str, Any], maker: JsonMaker) -> BodyMaker | None:
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return None
    schema = next(iter(content.values()))["schema"]
    return lambda chance: maker.sample(schema)


def atropos_operations() -> list[Operation]:
    """The Atropos server has no document."""

    def group(chance: random.Random) -> Json:
        size = chance.randint(1, 4)
        further = {name: [value] * size for name, value in OF_SEQUENCES.items() if chance.random() < 0.3}
        further |= {name: value for name, value in OF_GROUPS.items() if chance.random() < 0.3}
        return scored_group(chance.randrange(2**31), size, **further)

    def groups(chance: random.Random) -> Json:
        return [group(chance) for _ in range(chance.randint(1, 3))]

    def lease(chance: random.Random) -> Json:
        return {"lease": chance.choice(("", "a", "é", *(b64encode(text.encode()).decode() for text in LEASES)))}

    calls: list[tuple[str, str, BodyMaker | None]] = [
        ("POST", "/register", lambda chance: dict(TRAINER)),
        ("POST", "/register-env", lambda chance: dict(ENVIRONMENT)),
        ("POST", "/disconnect-env", lambda chance: {"env_id": chance.randrange(1000)}),
        ("POST", "/scored_data", group),
        ("POST", "/scored_data", group),
        ("POST", "/scored_data_list", groups),
        ("POST", "/batch/ack", lease),
        ("POST", "/batch/nack", lease),
        ("GET", "/status-env", lambda chance: {"env_id": chance.randrange(1000)}),
        *(("GET", path, None) for path in ("/wandb_info", "/info", "/batch", "/status", "/latest_example", "/metrics")),
        *(("GET", path, None) for path in ("/", "/health", "/ready", "/reset_data", "/channel/validation/status")),
    ]
    number: Schema = {"type": "integer"}
    return [Operation(method, path, body, {"lease": number, "min_exactness": {}}) for method, path, body in calls]
