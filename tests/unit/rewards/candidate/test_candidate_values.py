"""Values come back as they were, and nothing but values comes back."""

import io
import json
from collections import Counter, OrderedDict, deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from math import inf, isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from stepwell.rewards.candidate.values import DEEPEST, TooLargeValue, Unsayable, from_json, to_json

ATOMS = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text() | some.binary()
KEYS = ATOMS | some.tuples(ATOMS, ATOMS) | some.frozensets(ATOMS, max_size=3)
VALUES = some.recursive(
    KEYS | some.complex_numbers(allow_nan=False),
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.lists(inner, max_size=4).map(tuple)
        | some.sets(KEYS, max_size=4)
        | some.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))


def types_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [type(value), *map(types_of, value)]
    return [type(value), *map(types_of, value.values())] if isinstance(value, dict) else type(value)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert types_of(back) == types_of(value)


@pytest.mark.parametrize(
    "value",
    [
        *(2**63, -(2**63), 2**10_000, inf, -inf, "\ud800", range(0, 10, 3), deque([1]), bytearray(b"x")),
        *(Decimal("1.50"), Fraction(-1, 3), date(2026, 1, 2), time(3, 4), timedelta(1, 2, 3)),
        *(datetime(2026, 1, 2, 3, tzinfo=UTC), {"dict": [1]}, {"a": 1}.keys(), {"a": 1}.items()),
    ],
)
def test_other_values_come_back(value: Any) -> None:
    back = there_and_back(value)
    assert (back, type(back)) == (value, type(value))


def test_nan_iterators_and_arrays_come_back() -> None:
    assert isnan(there_and_back(nan))
    assert list(there_and_back(iter([1, 2]))) == [1, 2]
    assert list(there_and_back(n for n in (1, 2))) == [1, 2]
    assert list(there_and_back({"a": 1}.values())) == [1]
    for array in (np.arange(6.0).reshape(2, 3), np.zeros((0, 3), np.int8), np.array(1j), np.array(["ab", "c"])):
        back = there_and_back(array)
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
    assert there_and_back([np.int64(7), np.bool_(True)]) == [7, True]


def test_a_derived_class_counts_as_what_it_holds() -> None:
    class Text(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    back = there_and_back([Text("x"), Counter("aab"), OrderedDict(b=1)])
    assert back == ["x", {"a": 2, "b": 1}, {"b": 1}]
    assert [type(each) for each in back] == [str, dict, dict]
    assert back[0] != "y"


@pytest.mark.parametrize(
    "value", [object(), print, int, pytest, io.StringIO("x"), [print], {1: print}, np.array([None]), ...]
)
def test_what_is_no_value_is_said(value: Any) -> None:
    with pytest.raises(Unsayable, match="an object of class|an array of type"):
        to_json(value)


def test_what_is_too_large_is_said() -> None:
    deep: Any = []
    for _ in range(DEEPEST + 1):
        deep = [deep]
    for value in (deep, 1 << 10**6):
        with pytest.raises(TooLargeValue):
            to_json(value)


@pytest.mark.parametrize(
    "written",
    [
        *({}, {"tuple": [], "set": []}, {"tuple": "ab"}, {"tuple": {}}, {"exec": ["1"]}, {"list": []}),
        *({"set": [[]]}, {"dict": [[1], []]}, {"dict": [[1]]}, {"dict": [[[]], [1]]}, {"float": ["1.0"]}),
        *({"__class__": [1]}, {"float": []}),
        *({"int": ["x"]}, {"int": [1]}, {"int": ["f" * 10**6]}, {"bytes": ["x"]}, {"complex": ["x"]}, {"range": ["x"]}),
        *({"Decimal": ["x"]}, {"Fraction": [1, 0]}, {"date": ["x"]}, {"timedelta": ["x"]}, {"dict_items": [1]}),
        *({"ndarray": ["|O8", [1], [1]]}, {"ndarray": ["<i8", [2], [1]]}, {"ndarray": [[], [], []]}),
        {"ndarray": [[["a", "<i4"]], [1], [1]]},
    ],
)  # fmt: skip
def test_what_is_not_written_by_it_is_not_read(written: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - of whatever class; the judge ends the test
        from_json(written)


def test_depth_is_bounded() -> None:
    written: Any = []
    for _ in range(DEEPEST + 1):
        written = {"tuple": [written]}
    with pytest.raises(ValueError, match="nested too deeply"):
        from_json(written)
