"""python_tests: the candidate's failures are scored, the harness's own are errors."""

import os
import subprocess
import sys
from typing import Any

import pytest

from stepwell.errors import RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.loading import load
from tests.unit.rewards.texts import answered

ADD = "def add(a, b):\n    return a + b"


def fenced(code: str) -> str:
    return f"First try:\n```python\nraise Exception\n```\nBetter:\n```python\n{code}\n```\nDone."


def score(code: str, tests: object, **options: Any) -> Score:
    result: Any = load("python_tests", options).call(answered(fenced(code), tests=tests))
    assert isinstance(result, Score)
    return result


def test_the_score_is_the_share_of_tests_that_pass() -> None:
    tests = {
        "sums": "assert add(1, 2) == 3",
        "texts": "assert add('a', 'b') == 'ba'",
        "names": "assert subtract(1, 1) == 0",
    }
    given = score(ADD, tests)
    assert given.value == pytest.approx(1 / 3)
    assert given.parts == {"sums": 1.0, "texts": 0.0, "names": 0.0}
    assert given.notes == (
        "2 of 3 tests failed\ntexts: AssertionError\nnames: NameError: name 'subtract' is not defined"
    )


def test_tests_in_a_list_are_numbered_and_do_not_see_one_another() -> None:
    given = score("seen = []", ["seen.append(1)", "assert not seen"])
    assert given.parts == {"test 1": 1.0, "test 2": 1.0}


FAILING = {
    "loop": ("while True: pass", "timed out"),
    "sleep": ("import time; time.sleep(60)", "timed out"),
    "memory": ("x = bytearray(10 * 2**30)", "MemoryError"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "with code -11"),
    "a way out": ("import os; os._exit(0)", "ended before the test did"),
    "exit": ("raise SystemExit(0)", "SystemExit"),
    "parricide": ("import os, signal; os.kill(os.getppid(), signal.SIGKILL); os.kill(-1, signal.SIGKILL); 1 / 0", ""),
    "large file": ("open('x', 'wb').write(bytes(10**8))", "File too large"),
    "no Python": ("def f(:", "SyntaxError"),
    "no bottom": ("(" * 100_000, "SyntaxError"),
    "input": ("input()", "EOFError"),
    "own verdict": ("print('ready'); print('passed'); 1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FAILING)
def test_code_that_misbehaves_fails_its_test(name: str) -> None:
    code, why = FAILING[name]
    given = score(code, ["pass"], seconds=2 if why == "timed out" else 30)
    assert given.value == 0.0
    assert why in given.notes


def test_code_sees_nothing_of_this_processs_environment_and_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "x")
    test = "import os\nassert 'SECRET' not in os.environ\nassert 'x' not in os.listdir()\nopen('x', 'w').write('1')"
    assert score(ADD, [test, test]).value == 1.0


def test_code_has_no_network() -> None:
    given = score("import socket; socket.create_connection(('192.0.2.1', 9))", ["pass"])
    assert "Network is unreachable" in given.notes


def test_tests_not_begun_in_time_have_failed() -> None:
    given = score("import time; time.sleep(0.5)", ["pass"] * 3, seconds=30, seconds_in_all=0.4)
    assert given.parts == {"test 1": 1.0, "test 2": 0.0, "test 3": 0.0}
    late = "not run: the time for all tests was up"
    assert given.notes.endswith(f"test 2: {late}\ntest 3: {late}")


def test_no_code_passes_no_test() -> None:
    given: Any = load("python_tests").call(answered("I cannot.", tests=["pass"]))
    assert given == Score(0.0, parts={"test 1": 0.0}, notes="the answer has no fenced block of code")


@pytest.mark.parametrize("tests", [None, [], {}, 7, [7]])
def test_no_tests_are_an_error(tests: object) -> None:
    with pytest.raises(RewardFailed):
        score(ADD, tests)


@pytest.mark.parametrize("test", ["assert f(1) ==", "import io\nf(io.StringIO())", "f(getattr)", "f(exec)"])
def test_a_test_that_cannot_be_run_is_an_error(test: str) -> None:
    with pytest.raises(RewardFailed, match="the test cannot be run"):
        score("def f(x): pass", [test])


def test_a_sandbox_that_does_not_start_is_an_error_or_a_failed_test(monkeypatch: pytest.MonkeyPatch) -> None:
    strict, zero = (load("python_tests", {"zero_if_not_run": zero}).call for zero in (False, True))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    sample = answered(fenced(ADD), tests=["pass"])
    with pytest.raises(RewardFailed, match="did not start"):
        strict(sample)
    given: Any = zero(sample)
    assert given.value == 0.0
    assert "not run: a sandbox did not start" in given.notes


def test_the_limits_of_whoever_runs_the_tests_are_not_exceeded() -> None:
    """A worker's child has a memory limit of its own, which its children inherit and cannot raise."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "from stepwell.rewards.builtin.python_tests import TestRun\n"
        "from stepwell.rewards.confinement.sandbox import SandboxLevel, open_sandbox\n"
        "print(repr(TestRun(open_sandbox(SandboxLevel.STRICT), 4, 4096).why_failed('', 'pass')[0]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert (done.stdout, done.stderr) == ("''\n", "")


CROSSING = {
    "arguments are changed in place": ("def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
    "later, too": (
        "class Game:\n    def __init__(self, b): self.b = b\n    def move(self): self.b[0].append(1)",
        "b = [[], []]\ng = Game(b)\ng.move()\nassert b == [[1], []]\ng.b.append(7)\nassert b[2] == 7 and g.b[2] == 7",
    ),
    "identity is kept": ("def f(x): return x", "x = {1: [2]}\nassert f(x) is x"),
    "functions of the test": ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
    "built-in functions": ("def f(g, xs): return g(xs)", "assert f(len, [1, 2]) == 2 and f(sorted, [2, 1]) == [1, 2]"),
    "objects of the test": (
        "def depth(n): return 0 if n is None else 1 + max(depth(n.left), depth(n.right))\ndef mark(n): n.value = 7",
        "class Node:\n    def __init__(self, left=None, right=None): self.left, self.right = left, right\n"
        "n = Node(Node(), None)\nassert depth(n) == 2\nmark(n)\nassert n.value == 7",
    ),
    "built-in exceptions": (
        "def f(x): raise ValueError('no', x)",
        "try:\n    f(1)\nexcept ValueError as e:\n    assert e.args == ('no', 1)\nelse:\n    raise AssertionError",
    ),
    "exceptions of the code": (
        "class Base(KeyError): pass\nclass Mine(Base): pass\ndef f(): raise Mine('x')",
        "try:\n    f()\nexcept Base as e:\n    assert isinstance(e, Mine) and isinstance(e, KeyError)",
    ),
    "classes of the code": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __mul__(self, n): return V(self.x * n)\n"
        "    def __repr__(self): return f'V({self.x})'",
        "v = V(2) * 3\nassert v.x == 6 and repr(v) == 'V(6)' and isinstance(v, V) and not isinstance(3, V)\nv.x = 9\n"
        "assert v.x == 9",
    ),
    "generators": ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
    "coroutines": ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
    "managers": (
        "class M:\n    def __enter__(self): return 5\n    def __exit__(self, kind, e, t): return kind is ValueError",
        "with M() as five:\n    assert five == 5\n    raise ValueError",
    ),
    "names that change": (
        "n = 0\ndef up():\n    global n\n    n += 1",
        "up()\nassert candidate.n == 1\nup()\nassert candidate.n == 2",
    ),
    "sets of the code's objects": (
        "class P:\n    pass\nclass Box:\n    def __init__(self): self.seen = {P(), P()}\n"
        "    def add(self): self.seen.add(P())\n    def count(self): return len(self.seen)",
        "b = Box()\nassert len(b.seen) == b.count() == 2\nb.add()\nassert len(b.seen) == b.count() == 3",
    ),
    "exception classes and coroutines come back": (
        "class Mine(Exception): pass\nasync def g(): return 7\nasync def both(x): return await x\n"
        "def f(kind): return kind is Mine",
        "import asyncio\nassert f(Mine) and asyncio.run(both(g())) == 7",
    ),
    "exceptions of the test": (
        "def f(kind, g):\n    try: g()\n    except kind: return 7",
        "def g(): raise ValueError\nassert f(Exception, g) == f((KeyError, ValueError), g) == 7",
    ),
    "ordered dicts and counters": (
        "from collections import Counter, OrderedDict\nd = OrderedDict(a=1, b=2)\n"
        "def used(key):\n    d.move_to_end(key)\n    return d\ndef count(s): return Counter(s)",
        "assert list(used('a')) == ['b', 'a']\nx = used('b')\nassert list(x) == ['a', 'b']\nused('a')\n"
        "assert list(x) == ['b', 'a'] and count('aab') == {'a': 2, 'b': 1}",
    ),
    "members of an object": (
        "class C:\n    def __iter__(self): return iter((1, 2))",
        "c = C()\nassert 2 in c and 3 not in c",
    ),
    "what was printed": (
        "def f(): print('hello')",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f()\n"
        "assert out.getvalue() == 'hello\\n'",
    ),
    "large numbers": ("def f(n): return 2 ** n", "assert f(50_000) == 2 ** 50_000 and f(-1) == 0.5"),
    "other values": (
        "import datetime, decimal\ndef f(x): return x",
        "from decimal import Decimal\nfrom datetime import date\nfrom fractions import Fraction\n"
        "for x in (b'a', 1j, (1, (2,)), frozenset({1}), Decimal('1.5'), Fraction(1, 3), date(2026, 1, 2), range(3), "
        "..., {1: {2, 3}}, bytearray(b'x'), float('inf'), '\\ud800', None, True):\n    assert f(x) == x, x",
    ),
    "arrays": (
        "import numpy\ndef f(n): return numpy.arange(n) * 2.0",
        "import numpy\nassert numpy.array_equal(f(3), [0, 2, 4]) and f(3)[1] == 2",
    ),
    "the code's own function of a built-in name": ("def pow(a, b): return 7", "assert candidate.pow(2, 3) == 7"),
    "checks by name": ("def g(x): return x * 2", "def check(candidate):\n    assert candidate(2) == 4\ncheck(g)"),
}


@pytest.mark.parametrize("name", CROSSING)
def test_values_cross_between_the_code_and_its_test(name: str) -> None:
    code, test = CROSSING[name]
    given = score(code, [test], seconds=30, memory_mb=2048)
    assert (given.value, given.notes) == (1.0, "")
