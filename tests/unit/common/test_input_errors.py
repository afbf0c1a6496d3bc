"""What pydantic finds wrong, in sentences."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from stepwell.common.user_input import explain_all


class Inner(BaseModel):
    name: str


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: Annotated[int, Field(ge=1, le=9)] = 1
    level: Literal["strict", "none"] = "none"
    inner: Inner | None = None
    names: list[str] = []
    even: int = 2

    @field_validator("even")
    @classmethod
    def check(cls, value: int) -> int:
        if value % 2:
            raise ValueError("use an even number")
        return value


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ('{"inner": {}}', "inner.name is missing"),
        ('{"count": 0}', "count must be at least 1"),
        ('{"count": 10}', "count must be at most 9"),
        ('{"count": "x"}', "count must be a whole number"),
        ('{"level": "strong"}', "level must be 'strict' or 'none'"),
        ('{"names": "a"}', "names must be a list"),
        ('{"names": [1]}', "names.0 must be a string"),
        ('{"inner": 1}', "inner must be a JSON object"),
        ('{"even": 1}', "even: use an even number"),
        ('{"coutn": 1}', "coutn: there is no such field"),
        ("[]", "it must be a JSON object"),
        ("{", "it is not JSON: EOF while parsing an object at line 1 column 1"),
    ],
)
def test_each_mistake_is_a_sentence(sent: str, said: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        Form.model_validate_json(sent)
    assert explain_all(wrong.value.errors()) == said


def test_a_value_that_may_be_a_key_is_not_repeated() -> None:
    with pytest.raises(ValidationError) as wrong:
        Form.model_validate({"count": "sk-secret", "level": "sk-secret"})
    assert "sk-secret" not in explain_all(wrong.value.errors())
