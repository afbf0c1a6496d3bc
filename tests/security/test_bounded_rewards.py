"""S5: an answer that is expensive to compare is a wrong answer, in bounded time; it does not evade its score."""

import time
from typing import Any

import pytest

from stepwell.rewards.builtin.mathematics import bounded_call
from stepwell.rewards.loading import load
from tests.unit.rewards.texts import answered

SIZE = 2**16
ENOUGH = 20.0
"""Seconds; the faults took 28 s and for ever on an idle machine, the mends take a part of one."""

EXPENSIVE_NUMBERS = {
    "groups of digits": "1" + ",111" * (SIZE // 4) + ",1",
    "separators": "1," * (SIZE // 2),
    "digits": "1" * SIZE,
    "blanks": ("1" + " " * 1_000) * (SIZE // 1_000),
    "fractions": "1/" * (SIZE // 2),
    "exponents": "1e" * (SIZE // 2) + "1e999999999",
}
EXPENSIVE_MATHEMATICS = {
    "power tower": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "power": r"\boxed{7^{99999999999}}",
    "factorial": r"\boxed{(99999999)!}",
    "sum": r"\boxed{\sum_{n=1}^{999999999} \frac{1}{n^n}}",
    "nesting": r"\boxed{" + "(" * 5_000 + "1" + ")" * 5_000 + "}",
    "digits": r"\boxed{" + "1" * SIZE + "}",
    "roots": r"\boxed{" + r"\sqrt{2+" * 200 + "1" + "}" * 200 + "}",
    "expansion": r"\boxed{(x+y+z+w)^{500} - (x+y+z)^{499}}",
}


@pytest.mark.parametrize("name", EXPENSIVE_NUMBERS)
def test_the_last_number_is_found_in_bounded_time(name: str) -> None:
    function: Any = load("number_match").call
    began = time.monotonic()
    assert function(answered(EXPENSIVE_NUMBERS[name], "7")) == 0.0
    assert time.monotonic() - began < ENOUGH


@pytest.mark.parametrize("name", EXPENSIVE_MATHEMATICS)
def test_an_expression_is_compared_in_bounded_time(name: str) -> None:
    function: Any = load("math_equal", {"seconds": 1.0}).call
    began = time.monotonic()
    assert function(answered(EXPENSIVE_MATHEMATICS[name], "7")) == 0.0
    assert time.monotonic() - began < ENOUGH


def test_large_numbers_are_still_numbers() -> None:
    function: Any = load("number_match").call
    assert function(answered("It is 1,234,567,890,123,456,789.", "1234567890123456789")) == 1.0


def test_a_bounded_call_returns_fails_or_is_ended() -> None:
    assert bounded_call(lambda: "x", cpu_seconds=1.0) == "x"
    assert bounded_call(lambda: str(bool(9**9**9)), cpu_seconds=1.0) is None
    assert bounded_call(lambda: str(1 / 0), cpu_seconds=1.0) is None


def test_json_that_is_nested_deeply_is_a_wrong_answer() -> None:
    schema: Any = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}
    function: Any = load("json_schema", {"schema": schema}).call
    assert function(answered("[" * 1_000 + "]" * 1_000)).value == 0.0
    assert function(answered("[[], [[]]]")).value == 1.0
