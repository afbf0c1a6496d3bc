"""A reward for JSON that conforms to a schema."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic import JsonValue

from stepwell.common.imports import install_command
from stepwell.errors import BadRequest, NotReady, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin.matching import answer_of, compiled, expected_of, last_block
from stepwell.rewards.sample import Sample


def json_schema(
    *, schema: Mapping[str, JsonValue] | None = None, schema_key: str = "schema", extract: str | None = None
) -> Callable[[Sample], Score]:
    """1 if the answer, or its last fenced block, is JSON that conforms to the schema; the notes name a violation.

    Without a schema, each trajectory's metadata holds one. References to other documents are never fetched.
    """
    pattern = compiled(extract) if extract else None
    fixed = _validator(schema, BadRequest) if schema is not None else None

    def score(sample: Sample) -> Score:
        validator = fixed or _validator(expected_of(sample, schema_key), RewardFailed)
        answer = answer_of(sample, pattern)
        try:
            value = orjson.loads(last_block(answer) or answer)
        except orjson.JSONDecodeError as failure:
            return Score(0.0, notes=f"no JSON: {failure}")
        try:
            error = next(validator.iter_errors(value), None)
        except RecursionError:
            return Score(0.0, notes="nested too deeply")
        return Score(1.0) if error is None else Score(0.0, notes=f"{error.json_path}: {error.message}"[:500])

    return score


def _validator(schema: object, failure: type[BadRequest | RewardFailed]) -> Any:
    if not isinstance(schema, Mapping):
        raise failure(f"the schema is a {type(schema).__name__}, not an object")
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY
    except ImportError:
        raise NotReady(f"json_schema needs jsonschema: {install_command('rewards')}") from None
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise failure(f"the schema is invalid: {error.json_path}: {error.message}") from None
    return kind(schema, registry=REGISTRY)
