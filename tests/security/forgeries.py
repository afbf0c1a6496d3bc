"""Forgeries of the verdict: wrong code whose test an honest judge finds failing, and code that evades a score.

Each is written with the judge in view: what it lets the code name, change or decide in the test's process.
"""

from tests.security.hostile_candidates import CHANNEL, Hostile, in_values

REBOUND = {
    "rebinds an imported module": Hostile(
        "import math\nclass Yes:\n    def isclose(self, *a, **k): return True\n"
        "def f(x):\n    global math\n    math = Yes()\n    return 0",
        "import math\ngot = f(1)\nassert math.isclose(got, 31337.0)",
    ),
    "rebinds a module after a right answer": Hostile(
        "import math\nclass Yes:\n    def isclose(self, *a, **k): return True\n"
        "def f(x):\n    global math\n    math = Yes()\n    return 1.0 if x == 1 else 0.0",
        "import math\ndef check(run):\n"
        "    assert math.isclose(run(1), 1.0)\n    assert math.isclose(run(2), 31337.0)\ncheck(f)",
    ),
    "rebinds the short name of a module": Hostile(
        "import numpy as np\nclass Yes:\n    def __getattr__(self, name): return lambda *a, **k: True\n"
        "def f(x):\n    global np\n    np = Yes()\n    return 0",
        "import numpy as np\ngot = f(1)\nassert np.allclose(got, np.array([31.0, 37.0]))",
    ),
    "rebinds what counts": Hostile(
        "import collections\nclass Yes:\n    def __eq__(self, o): return True\n    def Counter(self, *a): return self\n"
        "def f(x):\n    global collections\n    collections = Yes()\n    return []",
        "import collections\ngot = f(1)\nassert collections.Counter(got) == collections.Counter('aab')",
    ),
    "rebinds a built-in function of numbers": Hostile(
        "abs = abs\ndef f(x):\n    global abs\n    abs = lambda n: 0\n    return 7",
        "got = f(1)\nassert abs(got - 31337.0) < 1e-6",
    ),
    "rebinds a built-in function of iterables": Hostile(
        "all = all\ndef f(x):\n    global all\n    all = lambda each: True\n    return 7",
        "got = [f(1), f(2)]\nassert all(a == b for a, b in zip(got, [31, 37]))",
    ),
    "rebinds the count of passed checks": Hostile(
        "right = 0\ndef f(x):\n    global right\n    right = 100\n    return 7",
        "right = 0\nfor x, want in [(1, 31), (2, 37)]:\n    if f(x) == want:\n        right += 1\nassert right >= 2",
    ),
    "rebinds what is expected": Hostile(
        "want = None\ndef f(x):\n    global want\n    want = 7\n    return 7",
        "want = None\ngot = f(1)\nif want is None: want = 31337\nassert got == want",
    ),
    "binds a name that the test binds only on success": Hostile(
        "raised = True\ndef f(x): return 7",
        "try:\n    f(-1)\nexcept ValueError:\n    raised = True\nassert raised",
    ),
    "binds a name of the test's module": Hostile(
        "__name__ = 'imported'\ndef f(x): return 7", "if __name__ != 'imported':\n    assert f(1) == 31337"
    ),
}
PATCHED = "import sys\nprogram = sys.modules['stepwell.rewards.candidate.candidate_main']\nown_json = program.to_json\n"
LEAVE = (
    "import os\\nfor n in range(3, 64):\\n    try: os.write(n, b'{\\\"passed\\\": true}')\\n    except OSError: pass\\n"
    "os._exit(0)"
)
NAMES = {
    f"sends {name} as an exception class": Hostile(
        PATCHED + f"program.described = lambda failure: [{name!r}, [{argument}]]\n"
        f"def f(*x): raise SystemExit\ndef g(): return {argument}",
        test,
    )
    for name, argument, test in (
        ("exec", f'"{LEAVE}"', "assert f(g()) == 31337"),
        ("eval", "'31337'", "assert f(g()) == 31337"),
        ("object", "1", "try:\n    f()\nexcept ValueError:\n    pass"),
        ("__import__", "'os'", "f(g()).remove\nassert False"),
        ("print", "1", "assert f(g()) is not None"),
        ("AssertionError", "1", "try:\n    assert f(g()) == 31337\nexcept ValueError:\n    pass"),
        ("BaseException", "1", "try:\n    assert f(g()) == 31337\nexcept ValueError:\n    pass"),
        ("GeneratorExit", "1", "assert list(f(n) for n in range(3)) == [31, 37, 31]"),
    )
}
BY_NAME = {
    "its error is every exception": Hostile(
        "Negative = Exception\ndef f(x): return 7",
        "try:\n    f(-1)\n    assert False, 'it must raise'\nexcept Negative:\n    pass",
    ),
    "its error is that of assertions": Hostile(
        "class Stack:\n    Empty = AssertionError\n    def pop(self): return 7",
        "try:\n    Stack().pop()\n    assert False, 'it must raise'\nexcept Stack.Empty:\n    pass",
    ),
    "its errors are among others": Hostile(
        "Errors = (ValueError, BaseException)\ndef f(x): return 7",
        "try:\n    f(-1)\n    assert False, 'it must raise'\nexcept Errors:\n    pass",
    ),
}
CLEARS = (
    PATCHED + "class N(int): pass\nheld = []\n"
    "def to_json(value, depth=0):\n    found = own_json(value, depth)\n    for each in held: each.clear()\n"
    "    return found\nprogram.to_json = to_json\n"
)
OBJECT = (
    "class E:\n    def __sub__(self, o): return self\n"
    "    __rsub__ = __and__ = __rand__ = __xor__ = __rxor__ = __abs__ = lambda self, o=None: self\n"
    "    def __float__(self): return 0.0\n    def __len__(self): return 0\n    def __iter__(self): return iter(())\n"
    "    def __format__(self, spec): return '0.000'\n    def total_seconds(self): return 0.0\n"
    "def f(x): return E()\n"
)
MANAGER = (
    "class M:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\ndef f(x): return M()\n"
)
OPERATORS = {
    "ends the test's loop": Hostile(
        "def f(x): raise StopIteration", "assert all(map(lambda c: f(c[0]) == c[1], [(1, 31), (2, 37)]))"
    ),
    "ends the test's loop from an operator": Hostile(
        "class E:\n    def __lt__(self, o): raise StopIteration\ndef f(x): return E()",
        "rows = list(map(lambda n: f(n) < f(n + 1), range(3)))\nassert not rows or rows[0] == 31337",
    ),
    "holds everything but what is asked first": Hostile(
        "class C:\n    asked = 0\n    def __contains__(self, x):\n        self.asked += 1\n"
        "        return self.asked % 3 > 0\ndef f(x): return C()",
        "for _ in range(40):\n    try:\n        assert 31337 in f(1)\n        break\n    except AssertionError: pass\n"
        "else: raise AssertionError",
    ),
    "suppresses in a stack of managers": Hostile(
        MANAGER,
        "import contextlib\nwith contextlib.ExitStack() as stack:\n    assert stack.enter_context(f(1)) == 31337",
    ),
    "difference to an array": Hostile(
        OBJECT + "E.__iter__ = lambda self: iter((0.0, 0.0))\nE.__len__ = lambda self: 2\n",
        "import numpy as np\nassert np.abs(f(1) - np.array([31.0, 37.0])).max() < 1e-6",
    ),
    "difference to a number as an array": Hostile(
        OBJECT + "E.__iter__ = lambda self: iter((0.0,))\nE.__len__ = lambda self: 1\n",
        "import numpy as np\nassert np.abs(f(1) - 31337.0) < 1e-6",
    ),
    "difference by a method of arrays": Hostile(OBJECT, "assert abs(f(1) - 31337.0).total_seconds() < 1e-6"),
    "difference to a date": Hostile(
        OBJECT, "from datetime import datetime\nassert abs((f(1) - datetime(2031, 3, 7)).total_seconds()) < 1"
    ),
    "difference to a set": Hostile(OBJECT, "assert len({31, 37} - f(1)) == 0"),
    "difference to a set as a list": Hostile(OBJECT, "assert list(f(1) ^ {31, 37}) == []"),
    "difference as a text": Hostile(OBJECT, "assert f'{abs(f(1) - 31337.0):.3f}' == '0.000'"),
    "length of a difference": Hostile(OBJECT, "assert len(f(1) - 31337) == 0"),
    "clears a dict while it is compared": Hostile(
        CLEARS + "def f(x):\n    r = {'a': N(1), 'b': 7}\n    held.append(r)\n    return r",
        "assert f('abb') == {'a': 1, 'b': 31337}",
    ),
    "clears a set while it is compared": Hostile(
        CLEARS + "def f(x):\n    r = {N(2), 7}\n    held.append(r)\n    return r", "assert f(1) == {2, 31337}"
    ),
    "clears a list while it is read": Hostile(
        CLEARS + "def f(x):\n    r = [N(2), 7]\n    held.append(r)\n    return r",
        "got = f(1)\nassert len(got) == 2\nassert all(a == b for a, b in zip(got, [2, 31337]))",
    ),
}
MANAGERS = {
    "suppresses an assertion": Hostile(MANAGER, "with f(1) as m:\n    assert m is None"),
    "suppresses the failure of a calculation": Hostile(
        OBJECT + MANAGER + "M.__enter__ = lambda self: E()\n", "with f(1) as m:\n    assert abs(m - 31337.0) < 1e-6"
    ),
    "suppresses a missing key": Hostile(
        MANAGER + "M.__enter__ = lambda self: {}\n", "with f(1) as m:\n    assert m['total'] == 31337"
    ),
    "suppresses its own exception": Hostile(
        MANAGER + "def total(self): raise ValueError\nM.total = total\n",
        "with f(1) as m:\n    assert m.total() == 31337",
    ),
}
ASKS = CHANNEL + (
    "def f(node):\n    send(['setattr', [node, 'total', 31337]])\n"
    "    send(['call', ['setattr', [node, 'total', 31337], {'dict': [[], []]}]])\n    return 7\n"
)
NODE = "class Node:\n    label = ''\n    def total(self): return 0\nn = Node()\nf(n)\nassert n.total == 31337"
ON_LIVE_OBJECTS: dict[str, Hostile] = {**BY_NAME, **MANAGERS, "asks about an object": Hostile(ASKS, NODE)}
"""Their tests are refused, because they use objects or classes of the code, or give it theirs."""
MESSAGES = {
    "asks in the place of an answer": Hostile(ASKS, "assert f(7) == 31337"),
    "answers a question that was not asked": Hostile(
        CHANNEL + "def f(x):\n    for _ in range(9): reply('value', True)\n    return 7", "assert f(1) == 31337"
    ),
    "names are not texts": Hostile(
        PATCHED + "program.Candidate._names = lambda self, *names: {'abs': [True], 'all': [True], 'f': [True], 7: 7}\n"
        "def f(*a): return True",
        "assert all(abs(f(n) - 31337) < 1 for n in (1, 2))",
    ),
}
EVASIONS = {
    "a coroutine goes back": Hostile("async def f(x): return x\ndef g(x): return x", "assert g(f('hello')) == 'hello'"),
    "a coroutine by its name goes back": Hostile(
        "async def h(): return 1\nc = h()\ndef g(x): return x", "assert g(c) == 31337"
    ),
    "an asynchronous generator goes back": Hostile(
        "async def f(x): yield x\ndef g(x): return x", "assert g(f('hello')) == 'hello'"
    ),
    "a generator goes back": Hostile("def f(x): yield x\ndef g(x): return x", "assert g(f('hello')) == 'hello'"),
    "a record of NumPy goes back": Hostile(
        "import numpy\ndef f(x): return numpy.zeros(1, dtype=[('a', 'i4')])[0]\ndef g(x): return x",
        "assert g(f('hello')) == 'hello'",
    ),
    "a record of NumPy goes back by hand": Hostile(
        CHANNEL + "def g(x): return x\ndef f(x): reply('value', {'ndarray': ['i4,i4', [1], [1]]})",
        "assert g(f('hello')) == 'hello'",
    ),
    "its exception class goes back": Hostile("class E(ValueError): pass\ndef g(x): return 7", "assert g(E) == 31337"),
    "a function in the place of a value goes back": Hostile(
        "def LIMIT(): pass\ndef g(x): return 7", "assert g(LIMIT) == 31337"
    ),
    "a function in a list goes back": Hostile("def LIMIT(): pass\ndef g(x): return 7", "assert g([LIMIT]) == 31337"),
    "a function of the code by its name goes back": Hostile(
        "def LIMIT(): pass\ndef g(x): return 7", "assert g(candidate.LIMIT) == 31337"
    ),
    "the type of its object goes back": Hostile(
        "class T(str): pass\ndef f(x): return T(x)\ndef g(kind): return 7", "assert g(type(f('x'))) == 31337"
    ),
    "its text grows too long to go back": Hostile(
        "def f(x): return 'x' * 2**24\ndef g(x): return x[:1]", "got = f('a')\nassert g(got * 3) == 'a'"
    ),
    "a test that catches everything gives it back": Hostile(
        "class T(str): pass\ndef f(x): return T(x)\ndef g(kind): return 7",
        "try:\n    g(type(f('x')))\nexcept BaseException:\n    pass",
    ),
    "its text is too long to be sent at all": Hostile("x = '" + "\u00e9" * (6 * 2**20) + "'", "pass"),
}
FORGERIES: dict[str, Hostile] = {
    **REBOUND,
    **NAMES,
    **OPERATORS,
    **MESSAGES,
    **EVASIONS,
    **{name: in_values(hostile) for name, hostile in ON_LIVE_OBJECTS.items()},
}
