"""python_tests: the candidate's failures are scored; those of the tests and of the machine are errors."""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stepwell.errors import RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin.python_tests import TestRun
from stepwell.rewards.confinement.sandbox import SandboxLevel, open_sandbox
from stepwell.rewards.loading import load
from tests.unit.rewards.builtin.held_out_tests import JUDGED, UNJUDGED, Task
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


BROKEN = {
    "assert f(1) ==": "SyntaxError: invalid syntax",
    "import io\nf(io.StringIO())": "f(…) is given an object of class StringIO, and only values can be given",
    "f(getattr)": "getattr is no value",
    "f(exec)": "exec is no value",
    "f([1, lambda: 1])": "a function is no value",
    "in_candidate('f(1) ==')": "SyntaxError",
    "in_candidate('assert f(1) == 1')": "the code would decide this assert; compare the value in the test",
}


@pytest.mark.parametrize("test", BROKEN)
def test_a_test_that_cannot_be_run_is_an_error(test: str) -> None:
    with pytest.raises(RewardFailed, match="the test cannot be run") as refused:
        score("def f(x): pass", [test])
    assert BROKEN[test] in str(refused.value)


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
    "arguments by name, in tuples, of other classes": (
        "def f(pair, *, seen, last):\n    pair[0].append(1)\n    seen.update(b=2)\n    last.appendleft(0)",
        "from collections import OrderedDict, deque\nx, seen, last = [], OrderedDict(a=1), deque([5])\n"
        "f((x, 1), seen=seen, last=last)\nassert x == [1] and list(seen) == ['a', 'b'] and last == deque([0, 5])",
    ),
    "arguments of a call that raises": (
        "def f(x):\n    x.clear()\n    raise ValueError",
        "x = [1]\ntry:\n    f(x)\nexcept ValueError:\n    assert x == []\nelse:\n    raise AssertionError",
    ),
    "built-in exceptions": (
        "def f(x): raise ValueError('no', x)",
        "try:\n    f(1)\nexcept ValueError as e:\n    assert e.args == ('no', 1)\nelse:\n    raise AssertionError",
    ),
    "exceptions with other arguments": (
        "def f(): b'\\xff'.decode()\ndef g(): open('/no/such')",
        "try:\n    f()\nexcept UnicodeDecodeError as e:\n    assert e.start == 0\nelse:\n    raise AssertionError\n"
        "try:\n    g()\nexcept FileNotFoundError as e:\n    assert 'No such file' in str(e)\n"
        "else:\n    raise AssertionError",
    ),
    "exceptions of the code": (
        "class Base(KeyError): pass\nclass Mine(Base): pass\ndef f(): raise Mine('x')",
        "try:\n    f()\nexcept KeyError as e:\n    assert e.args == ('x',)\n"
        "assert in_candidate('issubclass(Mine, Base)')",
    ),
    "the end of an iterator": (
        "def f(): raise StopIteration",
        "try:\n    f()\nexcept RuntimeError as e:\n    assert 'StopIteration' in str(e)\n"
        "else:\n    raise AssertionError",
    ),
    "classes of the code stay there": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __mul__(self, n): return V(self.x * n)\n"
        "    def __repr__(self): return f'V({self.x})'",
        "in_candidate('v = V(2) * 3')\nassert in_candidate('[v.x, repr(v), isinstance(v, V)]') == [6, 'V(6)', True]\n"
        "in_candidate('v.x = 9')\nassert in_candidate('v.x') == 9 and in_candidate('x = 1') is None",
    ),
    "a generator gives an iterator": (
        "def f(n):\n    for i in range(n): yield i",
        "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0 and f(1) != [0]",
    ),
    "a generator that raises": (
        "def f():\n    yield 1\n    raise ValueError('later')",
        "try:\n    list(f())\nexcept ValueError as e:\n    assert str(e) == 'later'\nelse:\n    raise AssertionError",
    ),
    "iterators go back": (
        "def f(n): return iter(range(n))\ndef g(xs): return sum(xs)",
        "assert g(f(4)) == 6 and g(map(abs, [-1, 2])) == 3 and g(x for x in (1, 2)) == 3",
    ),
    "names that change": (
        "n = 0\ndef up():\n    global n\n    n += 1",
        "up()\nassert candidate.n == 1\nup()\nassert candidate.n == 2",
    ),
    "derived classes count as what they hold": (
        "from collections import Counter, OrderedDict, namedtuple\nfrom enum import IntEnum\n"
        "P = namedtuple('P', 'x y')\n"
        "class Level(IntEnum): LOW = 1\nclass Items(list):\n    def __eq__(self, other): return False\n"
        "def f(): return [P(1, 2), Level.LOW, Items([1]), Counter('aab'), OrderedDict(b=1, a=2)]",
        "from collections import Counter\nassert f() == [(1, 2), 1, [1], {'a': 2, 'b': 1}, {'b': 1, 'a': 2}]\n"
        "assert [type(x) for x in f()] == [tuple, int, list, dict, dict] and list(f()[4]) == ['b', 'a']",
    ),
    "what was printed": (
        "def f(): print('hello')",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f()\n"
        "assert out.getvalue() == 'hello\\n'",
    ),
    "large numbers": ("def f(n): return 2 ** n", "assert f(50_000) == 2 ** 50_000 and f(-1) == 0.5"),
    "other values": (
        "import datetime, decimal\ndef f(x): return x",
        "from collections import deque\nfrom decimal import Decimal\nfrom datetime import date, time\n"
        "from fractions import Fraction\n"
        "for x in (b'a', 1j, (1, (2,)), frozenset({1}), Decimal('1.5'), Fraction(1, 3), date(2026, 1, 2), time(3), "
        "range(3), "
        "{1: {2, 3}, (4,): None}, bytearray(b'x'), deque([1]), float('inf'), '\\ud800', None, True):\n"
        "    assert f(x) == x and type(f(x)) is type(x), x",
    ),
    "arrays": (
        "import numpy\ndef f(n): return numpy.arange(n) * 2.0\ndef g(): return numpy.int64(7), numpy.zeros((0, 3))",
        "import numpy\nassert numpy.array_equal(f(3), [0, 2, 4]) and f(3)[1] == 2\n"
        "assert g()[0] == 7 and type(g()[0]) is int and g()[1].shape == (0, 3)",
    ),
    "the code's own function of a built-in name": ("def pow(a, b): return 7", "assert candidate.pow(2, 3) == 7"),
    "checks by name": ("def g(x): return x * 2", "def check(candidate):\n    assert candidate(2) == 4\ncheck(g)"),
}


@pytest.mark.parametrize("name", CROSSING)
def test_values_cross_between_the_code_and_its_test(name: str) -> None:
    code, test = CROSSING[name]
    given = score(code, [test], seconds=30, memory_mb=2048)
    assert (given.value, given.notes) == (1.0, "")


NO_VALUES = {
    "an object": ("class C: pass\ndef f(): return C()", "f()", "an object of class C, which is no value"),
    "an object in a list": ("class C: pass\ndef f(): return [C()]", "f()", "an object of class C, which is no value"),
    "an object in an argument": (
        "def f(x): x.append(f)",
        "f([])",
        "an argument that now holds an object of class function",
    ),
    "a module": ("import sys\ndef f(): return sys", "f()", "an object of class module"),
    "a coroutine": ("async def f(): pass", "f()", "an object of class coroutine"),
    "an array of objects": ("import numpy\ndef f(): return numpy.array([f])", "f()", "an array of type object"),
    "a deep list": ("def f():\n    x = []\n    for _ in range(200): x = [x]\n    return x", "f()", "100 levels deep"),
    "an endless iterator": ("import itertools\ndef f(): return itertools.count()", "f()", "more than 1,000,000 items"),
    "a long number": ("def f(): return 1 << 10**6", "f()", "a number that is too long"),
    "a large value": ("def f(): return 'x' * 2**24", "f()", "a value that is too large"),
    "a wide value": ("def f(): return [0] * (2**21 + 1)", "f()", "a value that is too large"),
    "its own arguments grow": ("def f(): return 'x' * 2**23\ndef g(x): pass", "g(f() * 3)", "too large to leave"),
    "its own arguments deepen": (
        "def f():\n    x = []\n    for _ in range(95): x = [x]\n    return x\ndef g(x): pass",
        "g([[[[[[[[[f()]]]]]]]]])",
        "g(…) is given a value that is nested",
    ),
}


@pytest.mark.parametrize("name", NO_VALUES)
def test_a_result_that_is_no_value_fails_the_test_whatever_the_test_catches(name: str) -> None:
    code, expression, why = NO_VALUES[name]
    test = f"try:\n    {expression}\nexcept BaseException:\n    pass"
    given = score(code, [test], seconds=60, memory_mb=2048)
    assert given.value == 0.0
    assert why in given.notes


def verdicts(tests: dict[str, tuple[str, str]]) -> dict[str, str]:
    """By name: why the test of some code failed; empty if it passed."""
    run = TestRun(open_sandbox(SandboxLevel.STRICT), 60.0, 2048)

    def verdict(code_and_test: tuple[str, str]) -> str:
        try:
            return run.why_failed(*code_and_test)[0]
        except RewardFailed as why:
            return f"REFUSED: {why}"

    with ThreadPoolExecutor(4) as threads:
        return dict(zip(tests, threads.map(verdict, tests.values()), strict=True))


def wrong(task: Task) -> str:
    """Functions of the same names."""
    names = (node.name for node in ast.parse(task.code).body if isinstance(node, ast.FunctionDef))
    return "\n".join(f"def {name}(*args, **keywords): return 31337" for name in names)


def test_right_solutions_pass_held_out_tests_and_wrong_ones_do_not() -> None:
    assert len(JUDGED) + len(UNJUDGED) >= 60
    assert verdicts({name: (task.code, task.test) for name, task in JUDGED.items()}) == dict.fromkeys(JUDGED, "")
    passed = [name for name, why in verdicts({n: (wrong(t), t.test) for n, t in JUDGED.items()}).items() if not why]
    assert passed == []


def test_held_out_tests_that_cannot_be_judged_say_so_and_can_be_written_otherwise() -> None:
    said = verdicts({name: (each.task.code, each.task.test) for name, each in UNJUDGED.items()})
    for name, each in UNJUDGED.items():
        assert re.search(each.sentence, said[name]), (name, said[name])
        assert said[name].startswith("REFUSED") is each.is_refused, name
    instead = verdicts({name: (each.task.code, each.instead) for name, each in UNJUDGED.items()})
    assert instead == dict.fromkeys(UNJUDGED, "")


def test_a_refusal_depends_on_nothing_that_the_code_does() -> None:
    refused = {name: each for name, each in UNJUDGED.items() if each.is_refused}
    said = verdicts({name: (each.task.code, each.task.test) for name, each in refused.items()})
    assert verdicts({name: ("import os; os._exit(0)", each.task.test) for name, each in refused.items()}) == said
