from typing import Any

import pytest

from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.loading import load
from tests.unit.rewards.texts import answered

SCHEMA: Any = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    "response", ['{"age": 7}', 'Here:\n```json\n{"age": 7}\n```\nDone.', '<think>{}</think>{"age":7}']
)
def test_json_that_the_schema_allows_scores_one(response: str) -> None:
    result: Any = load("json_schema", {"schema": SCHEMA}).call(answered(response))
    assert result.value == 1.0


@pytest.mark.parametrize(
    ("response", "note"),
    [('{"age": "7"}', "$.age: '7' is not of type"), ("{}", "'age' is a required"), ("7!", "no JSON")],
)
def test_other_json_scores_nought_and_says_why(response: str, note: str) -> None:
    result: Any = load("json_schema").call(answered(response, schema=SCHEMA))
    assert result.value == 0.0
    assert note in result.notes


def test_a_schema_that_is_none_is_nobodys_score() -> None:
    with pytest.raises(BadRequest, match="the schema is invalid"):
        load("json_schema", {"schema": {"type": 7}})
    with pytest.raises(RewardFailed, match="the schema is invalid"):
        load("json_schema").call(answered("{}", schema={"type": 7}))
    with pytest.raises(RewardFailed, match="not an object"):
        load("json_schema").call(answered("{}", schema="no"))


def test_a_schemas_references_are_not_fetched() -> None:
    function = load("json_schema", {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}})
    with pytest.raises(Exception, match="Unresolvable"):
        function.call(answered("{}"))
