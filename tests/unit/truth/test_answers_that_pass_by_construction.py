"""T11: a reward function gives no reward for an answer that is built to pass any check."""

from typing import Any

import pytest

from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.loading import load
from tests.unit.rewards.texts import answered

ALWAYS_EQUAL = """
class AlwaysEqual:
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __contains__(self, item): return True
    def __hash__(self): return 3
def f(*_): return AlwaysEqual()
"""
SUBCLASSES = """
class Number(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
class Text(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
class Items(list):
    def __eq__(self, other): return True
def f(kind): return {"int": Number(7), "str": Text("seven"), "list": Items([7])}[kind]
"""
MADE_BY_CALLS = "X = type('X', (), {'__eq__': lambda self, other: True})\ndef f(*_): return X()"
PATCHED = "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True\ndef f(*_): return 7"

CHEATS = [
    (ALWAYS_EQUAL, "assert f(1) == 3"),
    (ALWAYS_EQUAL, "assert 3 == f(1)"),
    (ALWAYS_EQUAL, "if f(1) != 3: raise ValueError"),
    (ALWAYS_EQUAL, "assert [f(1), f(2)] == [3, 4]"),
    (ALWAYS_EQUAL, "assert {'a': (f(1),)} == {'a': (3,)}"),
    (ALWAYS_EQUAL, "assert {f(1)} == {3}"),
    (ALWAYS_EQUAL, "assert f(1) in (3, 4)"),
    (ALWAYS_EQUAL, "assert 3 in f(1)"),
    (ALWAYS_EQUAL, "assert abs(f(1) - 3.0) < 1e-9"),
    (ALWAYS_EQUAL, "def check():\n    assert f(1) == 3\ncheck()"),
    (SUBCLASSES, "assert f('int') == 3"),
    (SUBCLASSES, "assert f('str') == 'three'"),
    (SUBCLASSES, "assert f('list') == [3]"),
    (MADE_BY_CALLS, "assert f(1) == 3"),
    (PATCHED, "assert abs(f(1) - 3) < 1e-9"),
    (PATCHED, "assert all(f(n) == n for n in range(3))"),
]

HONEST = """
from collections import Counter, deque, namedtuple
from enum import Enum, IntEnum
from fractions import Fraction
Point = namedtuple("Point", "x y")
class Colour(Enum): RED = 1
class Level(IntEnum): LOW = 1
class Vector:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __hash__(self): return hash(self.x)
class Evens:
    def __iter__(self): return iter((0, 2, 4))
class Stack(list): pass
def same(x): return x
def half(): return Fraction(1, 2)
nothing = None
"""
HONEST_TESTS = [
    "assert in_candidate('Point(1, 2)') == (1, 2)",
    "assert in_candidate('[Colour.RED == Colour(1), Colour.RED != 1]') == [True, True]",
    "assert in_candidate('Level.LOW') == 1 and in_candidate('Level.LOW') < 2",
    "assert in_candidate('[Vector(1) == Vector(1), Vector(1) != Vector(2), Vector(1) < Vector(2)]') == [True] * 3",
    "assert in_candidate('[[Vector(1)] == [Vector(1)], Vector(2) in [Vector(1), Vector(2)]]') == [True] * 2",
    "assert in_candidate('list(Evens())') == [0, 2, 4]",
    "assert Stack([1, [2]]) == [1, [2]]",
    "from collections import Counter\nassert same(Counter('aab')) == {'a': 2, 'b': 1}",
    "from collections import deque\nassert same(deque([1, 2])) == deque([1, 2])",
    "assert half() == 0.5 and 3 in same(range(5))",
    "assert same({'a': 1}.keys()) == {'a'} and 1 < same(2) <= 2",
    "assert nothing is None and same(nothing) == None",
    "x = [1]\nassert same(x) == x",
]


def passes(code: str, tests: list[str]) -> list[bool]:
    result: Any = load("python_tests").call(answered(f"```python\n{code}\n```", tests=tests))
    return [value == 1.0 for value in result.parts.values()]


@pytest.mark.parametrize("code", [ALWAYS_EQUAL, SUBCLASSES, MADE_BY_CALLS, PATCHED])
def test_a_test_of_generated_code_is_not_decided_by_that_codes_own_operators_and_functions(code: str) -> None:
    tests = [test for cheat, test in CHEATS if cheat == code]
    assert dict(zip(tests, passes(code, tests), strict=True)) == dict.fromkeys(tests, False)


def test_classes_with_operators_of_their_own_pass_the_tests_that_they_should() -> None:
    assert dict(zip(HONEST_TESTS, passes(HONEST, HONEST_TESTS), strict=True)) == dict.fromkeys(HONEST_TESTS, True)


@pytest.mark.parametrize(("expected", "right"), [("A", "a."), ("The", "the"), ("...", "...")])
def test_an_empty_answer_does_not_match_one_that_normalises_to_nothing(expected: str, right: str) -> None:
    function: Any = load("normalised_match")
    assert [function.call(answered(text, expected)) for text in ("", "?", right)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("name", ["exact_match", "normalised_match", "regex_match"])
def test_an_expected_answer_without_text_is_a_fault_of_the_data(name: str) -> None:
    function: Any = load(name)
    with pytest.raises(RewardFailed, match="empty"):
        function.call(answered("", " "))


def test_a_pattern_that_matches_every_answer_is_refused() -> None:
    with pytest.raises(BadRequest, match="the empty pattern"):
        load("regex_match", {"pattern": ""})
