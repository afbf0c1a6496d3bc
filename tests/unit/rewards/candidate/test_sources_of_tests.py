"""Which names of a test are the code's; what is refused, and what is not."""

import pytest

from stepwell.rewards.candidate.source import RefusedTest, read_source

NAMES = {
    "assert f(1) == 2": ["f"],
    "import math\nx = 1\nassert math.isclose(f(x), y)": ["f", "y"],
    "def check(candidate):\n    z = 1\n    assert candidate(z) == g(z)\ncheck(f)": ["f", "g"],
    "assert [f(x) for x in xs] == sorted(xs)": ["f", "sorted", "xs"],
    "def setup():\n    global n\n    n = f\nsetup()\nassert n(1)": ["f"],
    "class T:\n    def run(self): return f(self.x)\nassert candidate.pow(2) == in_candidate('1')": ["f"],
    "try:\n    f()\nexcept ValueError as e:\n    assert e.args": ["ValueError", "f"],
}
FINE = (
    "assert f(1).strip().split(',')[0] == 'a'",
    "x = f(1)\nassert x.items() and x.real and x.tolist() and x.shape and x.year and x.numerator and x.most_common()",
    "s = f(1)\ns = object()\ns.anything",
    "def check(f):\n    f(lambda x: x)\ncheck(print)",
    "assert list(map(f, xs)) == sorted(xs, key=f) and max(xs, key=lambda x: f(x))",
    "def reference(n): return n\nassert f(reference(3)) == reference(f(3))",
    "f(n for n in range(3))\nf(map(lambda x: x, xs))\nf(*xs, **{'a': [1, (2,)]})",
    "str = 'a'\nassert f(str) == [f(id) for id in xs]",
    "import unittest\nunittest.TestCase().assertRaises(ValueError, f, 1)",
    "import pytest\nwith pytest.raises((ValueError, KeyError)):\n    f(1)",
    "assert isinstance(f(1), (int, str)) and type(f(1)) is int",
    "in_candidate(f'g({f(1)})')\nin_candidate('x = 1\\nx')",
    "import asyncio\nasync def g(): return f(1)\nassert asyncio.run(g()) == 2",
)
REFUSED = {
    "f(lambda: 1)": "a function is no value",
    "candidate.f(x=lambda: 1)": "a function is no value",
    "f([{1: len}])": "len is no value",
    "f(*[print])": "print is no value",
    "def g(): pass\nf(g)": "a function is no value",
    "class C: pass\nf(C)": "C is no value",
    "class C: pass\nf(C())": "an object of the test is no value",
    "class C: pass\nc = C()\nc.x = 1\nf([c])": "an object of the test is no value",
    "f(1).push(2)": "no value has a 'push'",
    "x = f(1)\nx.push(2)": "no value has a 'push'",
    "f.cache_info()": "no value has a 'cache_info'",
    "assert np.allclose(f(1), 2)": "a test imports what it uses",
    "try:\n    f(1)\nexcept (ValueError, Mine):\n    pass": "Mine: a class of the code is not known to the test",
    "class Mine(Base): pass": "Base: a class of the code",
    "assert isinstance(f(1), Mine)": "Mine: a class of the code",
    "import pytest\nwith pytest.raises(Mine):\n    f(1)": "Mine: a class of the code",
    "with f(1) as x: pass": "a value is no context manager",
    "async def g(): return await f(1)": "a coroutine is no value",
    "import asyncio\nasyncio.run(f(1))": "a coroutine is no value",
    "in_candidate('assert f(1)')": "compare the value in the test",
    "in_candidate('f(')": "SyntaxError",
    "assert f(": "SyntaxError",
    "x = 1\0": "null bytes",
    "(" * 100_000: "SyntaxError",
}


@pytest.mark.parametrize("test", NAMES)
def test_the_names_that_a_test_uses_and_does_not_bind_are_the_codes(test: str) -> None:
    assert list(read_source(test).names) == NAMES[test]


@pytest.mark.parametrize("test", FINE)
def test_what_values_can_do_is_not_refused(test: str) -> None:
    read_source(test)


@pytest.mark.parametrize("test", REFUSED)
def test_what_no_value_can_do_is_refused_with_a_sentence(test: str) -> None:
    with pytest.raises(RefusedTest) as refused:
        read_source(test)
    assert REFUSED[test] in str(refused.value)
