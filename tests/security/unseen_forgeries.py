"""Forgeries written from the task alone, before their author read the grader.

The task: a program of untrusted origin is graded by Python tests. Every program here is wrong and
does not know the expected answer, so its score is 0: neither a pass nor "no score".

Cases are not adjusted to the grader. A new one is added at the end.
"""

from typing import NamedTuple


class Forgery(NamedTuple):
    code: str
    """The program that is graded."""

    tests: str
    """The tests that an honest grader finds failing."""


EQUALS_ALL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 3
    def __bool__(self): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __mod__ = __sub__
    def __abs__(self): return self
    __neg__ = __pos__ = __abs__
    def __round__(self, digits=None): return self
    def __getitem__(self, key): return self
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return self
    def __call__(self, *args, **kwargs): return self
"""

UNSEEN: dict[str, Forgery] = {
    # The answer decides its own comparison.
    "equals_all": Forgery(EQUALS_ALL + "def add(a, b): return Any()", "assert add(1, 2) == 3\nassert 7 == add(3, 4)"),
    "difference_is_small": Forgery(EQUALS_ALL + "def root(x): return Any()", "assert abs(root(4) - 2) < 1e-6"),
    "reflected_difference": Forgery(EQUALS_ALL + "def root(x): return Any()", "assert -1e-6 < 2 - root(4) < 1e-6"),
    "rounds_to_anything": Forgery(EQUALS_ALL + "def pi(): return Any()", "assert round(pi(), 2) == 3.14"),
    "sums_to_anything": Forgery(EQUALS_ALL + "def parts(n): return [Any(), Any()]", "assert sum(parts(9)) == 9"),
    "member_of_a_set": Forgery(EQUALS_ALL + "def pick(): return Any()", "assert pick() in {3}"),
    "contains_all": Forgery(EQUALS_ALL + "def names(): return Any()", "assert 'x' in names()"),
    "list_of_equals_all": Forgery(
        EQUALS_ALL + "def three(): return [Any(), Any(), Any()]",
        "assert three() == [1, 2, 3]\nassert sorted(three()) == [1, 2, 3]",
    ),
    "values_equal_all": Forgery(
        EQUALS_ALL + "def count(s): return {'a': Any(), 'b': Any()}",
        "assert count('aab') == {'a': 2, 'b': 1}",
    ),
    "subclass_of_int": Forgery(
        "class Int(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\n    def __ne__(self, other): return False\n"
        "def add(a, b): return Int(0)",
        "assert 3 == add(1, 2)",
    ),
    "subclass_of_str": Forgery(
        "class Str(str):\n    def __eq__(self, other): return True\n"
        "    __hash__ = str.__hash__\n    def strip(self, *a): return self\n"
        "    lower = strip\n"
        "def shout(s): return Str('')",
        "assert shout('hi').strip().lower() == 'hi!'",
    ),
    "subclass_of_list": Forgery(
        "class List(list):\n    def __eq__(self, other): return True\n"
        "    def __len__(self): return 3\n"
        "def three(): return List()",
        "r = three()\nassert isinstance(r, list) and len(r) == 3 and r == [1, 2, 3]",
    ),
    "subclass_of_float": Forgery(
        "class Float(float):\n    def __sub__(self, other): return 0.0\n    __rsub__ = __sub__\n"
        "def root(x): return Float(9)",
        "assert abs(root(4) - 2) < 1e-9",
    ),
    "formats_as_anything": Forgery(
        "class Str(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "class Fmt:\n    def __format__(self, spec): return Str('0')\n"
        "    def __str__(self): return Str('0')\n    __repr__ = __str__\n"
        "def pi(): return Fmt()",
        "assert f'{pi():.2f}' == '3.14'\nassert str(pi()) == '3.14'",
    ),
    "class_is_a_lie": Forgery(
        "class Lie:\n    __class__ = property(lambda self: list)\ndef make(): return Lie()",
        "assert type(make()) is list",
    ),
    "instance_is_a_lie": Forgery(
        "class Lie:\n    __class__ = property(lambda self: dict)\ndef make(): return Lie()",
        "assert isinstance(make(), dict)",
    ),
    "metaclass_equals_all": Forgery(
        "class Meta(type):\n    def __eq__(cls, other): return True\n"
        "    def __hash__(cls): return 1\n"
        "    def __instancecheck__(cls, other): return True\n"
        "    def __subclasscheck__(cls, other): return True\n"
        "class Lie(metaclass=Meta): pass\ndef make(): return Lie()",
        "assert type(make()) == dict",
    ),
    "numpy_asks_the_array": Forgery(
        "class Arr:\n    def __array_function__(self, *a, **k): return True\n"
        "    def __array_ufunc__(self, *a, **k): return True\n    __array_priority__ = 1e9\n"
        "    def __eq__(self, other): return True\ndef two(): return Arr()",
        "import numpy as np\nassert np.array_equal(two(), np.array([1, 2]))",
    ),
    # The program changes what the tests use.
    "builtins_are_replaced": Forgery(
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True\n"
        "builtins.sorted = lambda *a, **k: [1, 2]\ndef root(x): return 100",
        "assert abs(root(4) - 2) < 1e-6 and all([root(9) == 3])",
    ),
    "builtins_are_shadowed": Forgery(
        "def abs(x): return 0\ndef all(x): return True\ndef len(x): return 3\n"
        "def isinstance(*a): return True\ndef sorted(*a): return 1\ndef list(*a): return 1\n"
        "def root(x): return 100",
        "assert abs(root(4) - 2) < 1e-6",
    ),
    "shadow_by_global": Forgery(
        "def root(x):\n    global abs, sorted, isinstance\n    abs = lambda x: 0\n"
        "    sorted = isinstance = abs\n    return 100",
        "root(1)\nassert abs(root(4) - 2) < 1e-6",
    ),
    "library_is_replaced": Forgery(
        "import math\nmath.isclose = lambda *a, **k: True\ndef root(x): return 100",
        "import math\nassert math.isclose(root(4), 2)",
    ),
    "library_is_replaced_in_sys_modules": Forgery(
        "import sys\nclass Fake:\n    isclose = staticmethod(lambda *a, **k: True)\n"
        "sys.modules['math'] = Fake()\ndef root(x): return 100",
        "import math\nassert math.isclose(root(4), 2)",
    ),
    "library_is_a_file_in_the_folder": Forgery(
        "open('fractions.py', 'w').write('def Fraction(*a): return 5')\ndef half(): return 5",
        "from fractions import Fraction\nassert half() == Fraction(1, 2)",
    ),
    "builtins_of_the_namespace": Forgery(
        "def root(x):\n    global __builtins__\n    __builtins__ = {'abs': lambda x: 0}\n    return 100",
        "root(1)\nassert abs(root(4) - 2) < 1e-6",
    ),
    "expected_is_rebound": Forgery(
        "def three():\n    global expected\n    expected = 'x'\n    return 'x'",
        "expected = [1, 2, 3]\ngot = three()\nassert got == expected",
    ),
    "expected_is_reached_by_frames": Forgery(
        "import sys\ndef three():\n    f = sys._getframe()\n    while f:\n"
        "        f.f_globals['expected'] = 'x'; f.f_locals['expected'] = 'x'; f = f.f_back\n"
        "    return 'x'",
        "expected = [1, 2, 3]\ngot = three()\nassert got == expected",
    ),
    "expected_is_found_by_the_collector": Forgery(
        "import gc\ndef three():\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'expected' in o: o['expected'] = 'x'\n    return 'x'",
        "expected = [1, 2, 3]\ngot = three()\nassert got == expected",
    ),
    "check_is_rebound": Forgery(
        "def root(x):\n    global check\n    check = lambda *a: None\n    return 100",
        "def check(f):\n    assert f(4) == 2\nroot(0)\ncheck(root)",
    ),
    "assertion_error_is_replaced": Forgery(
        "import builtins\nclass Quiet(BaseException): pass\nbuiltins.AssertionError = Quiet\n"
        "AssertionError = Quiet\ndef root(x): return 100",
        "assert root(4) == 2",
    ),
    "trace_jumps_over_the_assertion": Forgery(
        "import sys\ndef t(frame, event, arg):\n"
        "    if frame.f_code.co_name == '<module>' and event == 'line':\n"
        "        try: frame.f_lineno += 1\n        except ValueError: pass\n    return t\n"
        "sys.settrace(t)\nf = sys._getframe()\nwhile f: f.f_trace = t; f = f.f_back\n"
        "def root(x): return 100",
        "got = root(4)\nassert got == 2\nassert got < 3\n",
    ),
    "unittest_is_replaced": Forgery(
        "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\ndef root(x): return 100",
        "import unittest\nunittest.TestCase().assertEqual(root(4), 2)",
    ),
    # The program ends, or reports, in the tests' place.
    "exits_with_success": Forgery("import os\ndef root(x): os._exit(0)", "assert root(4) == 2"),
    "exits_at_once": Forgery("import sys\nsys.exit(0)", "assert root(4) == 2"),
    "raises_system_exit": Forgery("def root(x): raise SystemExit(0)", "assert root(4) == 2\nassert root(9) == 3"),
    "raises_skip": Forgery("import unittest\ndef root(x): raise unittest.SkipTest('later')", "assert root(4) == 2"),
    "raises_keyboard_interrupt": Forgery("def root(x): raise KeyboardInterrupt", "assert root(4) == 2"),
    "raises_generator_exit": Forgery("def root(x): raise GeneratorExit", "assert root(4) == 2"),
    "raises_stop_iteration": Forgery("def root(x): raise StopIteration", "assert [root(4) for _ in range(1)] == [2]"),
    "raises_its_own_base_exception": Forgery(
        "class E(BaseException):\n    def __init__(self, a, b, c): pass\n"
        "    def __str__(self): raise self\n    __repr__ = __str__\n"
        "def root(x): raise E(1, 2, 3)",
        "assert root(4) == 2",
    ),
    "prints_a_verdict": Forgery(
        "import os, sys\nfor line in ('PASSED', 'ok', '1 passed', '{\"passed\": true}',"
        ' \'{"score": 1.0}\', \'{"ok": true, "reward": 1}\'):\n'
        "    for fd in range(1, 10):\n        try: os.write(fd, line.encode() + b'\\n')\n"
        "        except OSError: pass\nos._exit(0)\n",
        "assert root(4) == 2",
    ),
    "prints_a_verdict_at_exit": Forgery(
        "import atexit, os\natexit.register(lambda: (print('{\"passed\": true}', flush=True),"
        " os._exit(0)))\ndef root(x): return 100",
        "assert root(4) == 2",
    ),
    "forks_and_leaves": Forgery(
        "import os\ndef root(x):\n    if os.fork(): os._exit(0)\n    return 100",
        "assert root(4) == 2",
    ),
    "answers_from_a_thread": Forgery(
        "import os, threading\n"
        "threading.Thread(target=lambda: os._exit(0), daemon=True).start()\n"
        "def root(x): return 100",
        "assert root(4) == 2",
    ),
    "kills_its_parent": Forgery(
        "import os, signal\ndef root(x):\n    os.kill(os.getppid(), signal.SIGTERM)\n    return 100",
        "assert root(4) == 2",
    ),
    "kills_itself": Forgery(
        "import os, signal\ndef root(x): os.kill(os.getpid(), signal.SIGKILL)",
        "assert root(4) == 2",
    ),
    "closes_its_files": Forgery(
        "import os\ndef root(x):\n    os.closerange(0, 256)\n    return 2.5", "assert root(4) == 2"
    ),
    "stack_overflows": Forgery(
        "import sys\nsys.setrecursionlimit(10**8)\ndef root(x): return root(x)",
        "assert root(4) == 2",
    ),
    # The answer breaks what carries it.
    "answer_is_a_coroutine": Forgery("async def root(x): return 2", "assert root(4) == 2"),
    "answer_is_a_generator": Forgery("def root(x): yield 2", "assert root(4) == 2"),
    "answer_is_an_async_generator": Forgery("async def root(x): yield 2", "assert root(4) == 2"),
    "answer_is_a_lock": Forgery("import threading\ndef root(x): return threading.Lock()", "assert root(4) == 2"),
    "answer_is_a_module": Forgery("import sys\ndef root(x): return sys", "assert root(4) == 2"),
    "answer_is_a_file": Forgery("def root(x): return open(0)", "assert root(4) == 2"),
    "answer_is_a_frame": Forgery("import sys\ndef root(x): return sys._getframe()", "assert root(4) == 2"),
    "answer_is_not_implemented": Forgery("def root(x): return NotImplemented", "assert root(4) == 2"),
    "answer_is_surrogates": Forgery("def root(x): return '\\udcff' * 9", "assert root(4) == 2"),
    "answer_is_itself": Forgery("def root(x):\n    a = []\n    a.append(a)\n    return a", "assert root(4) == [2]"),
    "answer_is_deep": Forgery(
        "def root(x):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a",
        "assert root(4) == 2",
    ),
    "answer_is_a_long_number": Forgery("def root(x): return 1 << 200_000", "assert root(4) == 2"),
    "answer_is_large": Forgery("def root(x): return 'x' * (200 << 20)", "assert root(4) == 2"),
    "answer_cannot_be_described": Forgery(
        "class Odd:\n    def __repr__(self): raise SystemExit(0)\n    __str__ = __repr__\n"
        "    def __getattribute__(self, name): raise SystemExit(0)\ndef root(x): return Odd()",
        "assert root(4) == 2, root(4)",
    ),
    "answer_reduces_to_a_call": Forgery(
        "import os\nclass P:\n    def __reduce_ex__(self, v): return (os._exit, (0,))\ndef root(x): return P()",
        "assert root(4) == 2",
    ),
    # Names and classes that the program sends.
    "exception_named_like_a_builtin": Forgery(
        "class exec(Exception): pass\ndef root(x): raise exec('import os; os._exit(0)')",
        "try:\n    got = root(4)\nexcept Exception:\n    got = None\nassert got == 2",
    ),
    "exception_borrows_a_name": Forgery(
        "E = type('ValueError', (Exception,), {})\ndef root(x):\n    raise E('negative')",
        "try:\n    root(-1)\nexcept ValueError as e:\n    assert e.args == ('below zero',)\nelse:\n    assert False",
    ),
    "message_contains_all": Forgery(
        "class Str(str):\n    def __contains__(self, other): return True\n"
        "class E(ValueError):\n    def __str__(self): return Str('')\n"
        "def root(x): raise E()",
        "try:\n    root(-1)\nexcept ValueError as e:\n    assert 'negative' in str(e)\nelse:\n    assert False",
    ),
    "exception_matches_all": Forgery(
        "class M(type):\n    def __instancecheck__(c, o): return True\n"
        "    def __subclasscheck__(c, o): return True\n    def __eq__(c, o): return True\n"
        "    def __hash__(c): return 1\n"
        "class E(Exception, metaclass=M): pass\ndef root(x): raise E",
        "try:\n    root(-1)\nexcept ValueError:\n    pass",
    ),
    "name_of_a_class_is_code": Forgery(
        "T = type('x\\nimport os; os._exit(0)', (), {})\ndef root(x): return T()",
        "assert root(4) == 2",
    ),
    # What the tests pass in.
    "globals_of_a_callback": Forgery(
        "def twice(fn):\n    fn.__globals__['expected'] = 'x'\n    return 'x'",
        "expected = 4\ngot = twice(lambda x: x + 1)\nassert got == expected",
    ),
    "code_of_a_callback": Forgery(
        "def twice(fn):\n    fn.__code__ = (lambda x: 'x').__code__\n    return 'x'",
        "def inc(x): return x + 1\ngot = twice(inc)\nassert got == inc(3)",
    ),
    "class_of_an_argument": Forgery(
        "def double(p):\n    type(p).__eq__ = lambda a, b: True\n    return p",
        "class P:\n    def __init__(self, x): self.x = x\n"
        "    def __eq__(self, o): return self.x == o.x\n"
        "assert double(P(1)) == P(2)",
    ),
    "subclasses_of_object": Forgery(
        "def twice(fn):\n"
        "    for c in type(fn).__mro__[-1].__subclasses__():\n"
        "        g = getattr(getattr(c, '__init__', None), '__globals__', {})\n"
        "        if 'expected' in g: g['expected'] = 'x'\n    return 'x'",
        "expected = 4\nclass Fn:\n    def __init__(self): pass\n"
        "    def __call__(self, x): return x\n"
        "got = twice(Fn())\nassert got == expected",
    ),
    "callback_gets_a_hostile_value": Forgery(
        EQUALS_ALL + "def apply(fn):\n    fn(Any())\n    return None",
        "seen = []\napply(lambda x: seen.append(x == 4))\nassert seen == [True] and apply(str) == 'x'",
    ),
    "argument_is_filled_with_equals_all": Forgery(
        EQUALS_ALL + "def fill(xs): xs[:] = [Any(), Any()]",
        "xs = [2, 1]\nfill(xs)\nassert xs == [1, 2]",
    ),
}
