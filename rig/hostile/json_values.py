"""JSON for hostile requests: what a schema asks for, and what it does not expect."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

Json = Any
Schema = Mapping[str, Any]

DEEP = (100, 250, 254, 300, 900)
"""Levels of nesting. orjson reads deeper nesting than it writes."""
VALUES: tuple[Json, ...] = (
    *(None, True, False, 0, -1, 1, 3, 0.5, -0.0, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "tiny", "\x00", "\ud800", "\U0001d54f\u202e", "a" * 70_000, "../../etc/passwd", "'; DROP TABLE x; --"),
    *("<|im_end|>", "http://[::1", "1e999", "true", "null", "2024-01-01", "%00%ff", "{{7*7}}", "\r\nX-Header: y"),
    *([], {}, [None], [[]], [{}], [0] * 5_000, {"": ""}, {"a": {"a": {"a": None}}}, {"$ref": "#"}),
)
NAMES = ("", "model", "n", "__class__", "\x00", "messages", "stream", "a" * 300, "\ud800", "prompt_ids", "channel")
DEPTH_OF_SAMPLES = 6


class JsonMaker:
    """Makes values from a seed. `named` are values that a field of that name has in most samples."""

    def __init__(self, chance: random.Random, components: Schema, named: Mapping[str, Sequence[Json]]) -> None:
        self._chance = chance
        self._components = components
        self._named = named

    def sample(self, schema: Schema, name: str = "", depth: int = 0) -> Json:
        """A value that mostly fits the schema."""
        if name in self._named and self._chance.random() < 0.9:
            return self._chance.choice(self._named[name])
        schema = self._resolved(schema)
        if depth > DEPTH_OF_SAMPLES:
            return None
        if "enum" in schema:
            return self._chance.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object" or "properties" in schema:
            return self._sample_object(schema, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            count = self._chance.randint(least, max(least, min(least + 3, schema.get("maxItems", 3))))
            return [self.sample(schema.get("items", {}), depth=depth + 1) for _ in range(count)]
        return self._sample_plain(schema, kind)

    def mutated(self, value: Json) -> Json:
        """The same with one part replaced, removed or added."""
        if not isinstance(value, dict | list) or not value or self._chance.random() < 0.15:
            return self.hostile()
        value = value.copy()
        place = self._chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        what = self._chance.random()
        if what < 0.2:
            del value[place]
        elif what < 0.3 and isinstance(value, dict):
            value[self._chance.choice(NAMES)] = self.hostile()
        elif what < 0.35 and isinstance(value, list):
            value = value * self._chance.choice((2, 20))
        else:
            value[place] = self.mutated(value[place])
        return value

    def hostile(self) -> Json:
        if self._chance.random() < 0.04:
            return nested(self._chance.choice(DEEP))
        return self._chance.choice(VALUES)

    def _resolved(self, schema: Schema) -> Schema:
        while True:
            if "$ref" in schema:
                schema = self._components[schema["$ref"].rpartition("/")[2]]
            elif options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
                schema = self._chance.choice(options)
            else:
                return schema

    def _sample_object(self, schema: Schema, depth: int) -> Json:
        required, fields = schema.get("required", ()), schema.get("properties", {})
        wanted = [name for name in fields if name in required or self._chance.random() < 0.3]
        return {name: self.sample(fields[name], name, depth + 1) for name in wanted}

    def _sample_plain(self, schema: Schema, kind: object) -> Json:
        chance = self._chance
        if kind == "string":
            return chance.choice(("text", "a", "Say hello.", "http://127.0.0.1:9", f"x{chance.randrange(10**6)}"))
        if kind in ("integer", "number"):
            least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            number = chance.randint(int(least), min(int(least) + 20, int(schema.get("maximum", 10**9))))
            return number if kind == "integer" else number + chance.choice((0.0, 0.5))
        if kind == "boolean":
            return chance.random() < 0.5
        return None if kind == "null" else self.hostile()


def nested(levels: int) -> Json:
    value: Json = []
    for _ in range(levels):
        value = [value]
    return value
