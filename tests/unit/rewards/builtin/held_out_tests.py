"""Tests of generated code in the forms in which public collections of programming tasks write theirs.

The judge was not written from these. Where it cannot judge one, the list says so, and how the test is written instead.
"""

from typing import NamedTuple


class Task(NamedTuple):
    code: str
    """A right solution."""

    test: str


CHECKED: dict[str, Task] = {
    "numbers in a list": Task(
        "def close_pair(xs, gap):\n    return any(abs(a - b) < gap for i, a in enumerate(xs) for b in xs[i + 1:])",
        "def check(candidate):\n    assert candidate([1.0, 2.5, 2.6], 0.2) == True\n"
        "    assert candidate([1.0, 2.5, 3.9], 0.2) == False\n    assert candidate([], 1.0) == False\ncheck(close_pair)",
    ),
    "a title and messages": Task(
        "def vowels(text): return sum(c in 'aeiou' for c in text.lower())",
        "METADATA = {'author': 'me'}\n\ndef check(candidate):\n\n    # easy\n"
        "    assert candidate('Banana') == 3, 'counts every vowel: ' + str(candidate('Banana'))\n"
        "    assert True, 'prints if it is reached'\n\n    # edges\n    assert candidate('') == 0\n\ncheck(vowels)",
    ),
    "closeness to a float": Task(
        "def fraction_of(x): return x % 1.0",
        "def check(candidate):\n    assert candidate(3.5) == 0.5\n    assert abs(candidate(1.25) - 0.25) < 1e-6\n"
        "    assert abs(candidate(123.0) - 0.0) < 1e-6\ncheck(fraction_of)",
    ),
    "a helper of the solution": Task(
        "def encode(s): return s[::-1] + '!'\ndef decode(s): return s[:-1][::-1]",
        "def check(candidate):\n    from random import Random\n    import string\n    rng = Random(7)\n"
        "    for _ in range(20):\n        text = ''.join(rng.choice(string.ascii_lowercase) for i in range(rng.randint(1, 9)))\n"
        "        coded = encode(text)\n        assert candidate(coded) == text\ncheck(decode)",
    ),
    "a polynomial by a helper": Task(
        "def value_at(c, x): return sum(k * x ** i for i, k in enumerate(c))\n"
        "def root(c):\n    low, high = -1e3, 1e3\n    for _ in range(200):\n        mid = (low + high) / 2\n"
        "        if value_at(c, low) * value_at(c, mid) <= 0: high = mid\n        else: low = mid\n    return low",
        "def check(candidate):\n    import copy\n    import math\n    for c in ([-6.0, 2.0], [-8.0, 0.0, 0.0, 1.0]):\n"
        "        assert math.fabs(value_at(c, candidate(copy.deepcopy(c)))) < 1e-4\ncheck(root)",
    ),
    "a tuple": Task(
        "def extremes(xs): return (min(xs), max(xs)) if xs else (None, None)",
        "def check(candidate):\n    assert candidate([3, 1, 2]) == (1, 3)\n    assert candidate([]) == (None, None)\n"
        "check(extremes)",
    ),
    "mixed values": Task(
        "def only_ints(xs): return [x for x in xs if type(x) is int]",
        "def check(candidate):\n    assert candidate([]) == []\n    assert candidate([4, {}, [], 23.2, 9, 'x', True]) == [4, 9]\n"
        "check(only_ints)",
    ),
    "a dict": Task(
        "def histogram(text):\n    words = text.split()\n    most = max(map(words.count, words), default=0)\n"
        "    return {w: most for w in words if words.count(w) == most}",
        "def check(candidate):\n    assert candidate('a b b a') == {'a': 2, 'b': 2}\n    assert candidate('') == {}\n"
        "check(histogram)",
    ),
    "a dict of other keys": Task(
        "def lower_keys(d): return bool(d) and all(isinstance(k, str) and k.islower() for k in d)",
        "def check(candidate):\n    assert candidate({'p': 'x', 'q': 'y'}) == True\n"
        "    assert candidate({'p': 1, 8: 2, 'a': 3}) == False\n    assert candidate({}) == False\ncheck(lower_keys)",
    ),
    "texts and None": Task(
        "def larger(a, b):\n    x, y = (float(str(v).replace(',', '.')) for v in (a, b))\n"
        "    return None if x == y else a if x > y else b",
        "def check(candidate):\n    assert candidate(1, '2,5') == '2,5'\n    assert candidate('1', 1) == None\n"
        "    assert candidate('1', 1) is None\n    assert candidate(3, 2.5) == 3\ncheck(larger)",
    ),
    "a list of lists": Task(
        "def cells(rows, n): return [(i, j) for i, r in enumerate(rows) for j in range(len(r)) if r[j] == n]",
        "def check(candidate):\n    assert candidate([[1, 2], [2, 1]], 1) == [(0, 0), (1, 1)]\n"
        "    assert candidate([[], [1], [1, 2, 3]], 3) == [(2, 2)]\n    assert candidate([], 1) == []\ncheck(cells)",
    ),
    "not equal": Task(
        "def halves(n): return n // 2",
        "def check(candidate):\n    assert candidate(9) != 4.5\n    assert not candidate(1)\n    assert candidate(8) == 4\n"
        "check(halves)",
    ),
    "order of results": Task(
        "def by_digits(xs): return sorted(xs, key=lambda x: (sum(map(int, str(abs(x)))), x))",
        "def check(candidate):\n    assert candidate([11, 1, -1, 20]) == [-1, 1, 11, 20]\n"
        "    assert sorted(candidate([3, 2])) == [2, 3]\ncheck(by_digits)",
    ),
    "a table of cases": Task(
        "def sign(n): return (n > 0) - (n < 0)",
        "def check(candidate):\n    inputs = [[-5], [0], [7]]\n    results = [-1, 0, 1]\n"
        "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assert candidate(*inp) == exp, i\ncheck(sign)",
    ),
    "a checking function with tolerance": Task(
        "def means(rows): return [sum(r) / len(r) for r in rows]",
        "import math\ndef is_close(a, b, atol):\n    if isinstance(a, float):\n        return math.isclose(a, b, abs_tol=atol)\n"
        "    if isinstance(a, (list, tuple)):\n        return len(a) == len(b) and all(is_close(x, y, atol) for x, y in zip(a, b))\n"
        "    return a == b\n\ndef assertion(out, exp, atol):\n    exact_match = out == exp\n"
        "    if atol == 0 and isinstance(exp, float):\n        atol = 1e-6\n    if not exact_match and atol != 0:\n"
        "        assert is_close(out, exp, atol)\n    else:\n        assert exact_match\n\n"
        "def check(candidate):\n    for inp, exp in [([[1, 2], [0.1, 0.2]], [1.5, 0.15])]:\n"
        "        assertion(candidate(inp), exp, 1e-9)\ncheck(means)",
    ),
    "a reference solution": Task(
        "def total(n): return n * (n + 1) // 2",
        "def reference(n):\n    return sum(range(n + 1))\n\ndef check(candidate):\n    for n in range(30):\n"
        "        assert candidate(n) == reference(n)\ncheck(total)",
    ),
    "keywords": Task(
        "def pad(text, *, width=4, fill=' '): return text.rjust(width, fill)",
        "def check(candidate):\n    assert candidate('a') == '   a'\n    assert candidate('a', width=2, fill='0') == '0a'\n"
        "check(pad)",
    ),
    "a large number": Task(
        "def factorial(n): return 1 if n < 2 else n * factorial(n - 1)",
        "def check(candidate):\n    import math\n    assert candidate(5) == 120\n    assert candidate(60) == math.factorial(60)\n"
        "check(factorial)",
    ),
    "whitespace and unicode": Task(
        "def mirror(text): return text[::-1]",
        "def check(candidate):\n    assert candidate('añb\\n') == '\\nbña'\n    assert candidate('日本 😀') == '😀 本日'\n"
        "    assert candidate('\"') == '\"'\ncheck(mirror)",
    ),
    "a hash": Task(
        "import hashlib\ndef digest(text): return hashlib.md5(text.encode()).hexdigest() if text else None",
        "def check(candidate):\n    assert candidate('a') == '0cc175b9c0f1b6a831c399e269772661'\n    assert candidate('') is None\ncheck(digest)",
    ),
    "time of a run": Task(
        "def primes(n):\n    known = bytearray([1]) * (n + 1)\n    known[:2] = b'\\0\\0'[:n + 1]\n"
        "    for i in range(2, int(n ** 0.5) + 1):\n        if known[i]: known[i * i::i] = bytes(len(known[i * i::i]))\n"
        "    return [i for i in range(n + 1) if known[i]]",
        "def check(candidate):\n    assert candidate(10) == [2, 3, 5, 7]\n    assert len(candidate(100_000)) == 9592\n"
        "check(primes)",
    ),
    "an assertion in a comprehension": Task(
        "def square(n): return n * n",
        "def check(candidate):\n    assert all(candidate(n) == n ** 2 for n in range(-5, 6))\n"
        "    assert [candidate(n) for n in (1, 2)] == [1, 4]\n    assert list(map(candidate, [3, 4])) == [9, 16]\ncheck(square)",
    ),
}
ASSERTED: dict[str, Task] = {
    "a number": Task("def area(a, b): return a * b / 2", "assert area(4, 5) == 10"),
    "a float that is exact": Task("def half(a): return a / 2", "assert half(3) == 1.5"),
    "several lines": Task(
        "def smallest(xs): return min(xs)",
        "assert smallest([10, 20, 1]) == 1\nassert smallest([1, 2]) == 1\nassert smallest([45, 46, 50]) == 45",
    ),
    "a name with capitals": Task(
        "def Find_Max_Gap(xs): return max(xs) - min(xs)", "assert Find_Max_Gap([1, 9, 4]) == 8"
    ),
    "parentheses": Task(
        "def is_even(n): return n % 2 == 0", "assert (is_even(2)) == True\nassert (is_even(3)) == False"
    ),
    "only truth": Task("def is_even(n): return n % 2 == 0", "assert is_even(2)\nassert not is_even(3)"),
    "identity": Task("def first(xs): return xs[0] if xs else None", "assert first([]) is None\nassert first([5]) == 5"),
    "a tuple of a set": Task(
        "def common(a, b): return tuple(set(a) & set(b))", "assert set(common((3, 4, 5), (5, 4, 9))) == set((4, 5))"
    ),
    "a set": Task("def letters(s): return set(s)", "assert letters('aba') == {'a', 'b'}\nassert 'a' in letters('aba')"),
    "a frozenset as a key": Task(
        "def pairs(xs): return {frozenset((a, b)): a * b for a, b in xs}",
        "assert pairs([(1, 2)]) == {frozenset({1, 2}): 2}",
    ),
    "nested tuples": Task(
        "def swapped(xs): return [(b, a) for a, b in xs]",
        "assert swapped([('x', 1), ('y', 2)]) == [(1, 'x'), (2, 'y')]",
    ),
    "a text of values": Task("def shown(xs): return str(xs)", "assert shown([1, (2,)]) == '[1, (2,)]'"),
    "a counter": Task(
        "from collections import Counter\ndef count(xs): return Counter(xs)",
        "assert count([10, 10, 20]) == ({10: 2, 20: 1})\nfrom collections import Counter\nassert count('aa') == Counter('aa')",
    ),
    "a default dict": Task(
        "from collections import defaultdict\ndef groups(xs):\n    d = defaultdict(list)\n    for k, v in xs: d[k].append(v)\n"
        "    return d",
        "assert groups([(1, 3), (1, 2), (5, 6)]) == {1: [3, 2], 5: [6]}",
    ),
    "an ordered dict": Task(
        "from collections import OrderedDict\ndef by_name(d): return OrderedDict(sorted(d.items()))",
        "assert list(by_name({'b': 1, 'a': 2}).items()) == [('a', 2), ('b', 1)]",
    ),
    "a named tuple": Task(
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef point(): return P(1, 2)",
        "assert point() == (1, 2)\nassert point()[1] == 2",
    ),
    "a deque": Task(
        "from collections import deque\ndef turned(xs, n):\n    d = deque(xs)\n    d.rotate(n)\n    return d",
        "from collections import deque\nassert turned([1, 2, 3], 1) == deque([3, 1, 2])\nassert list(turned([1], 5)) == [1]",
    ),
    "a generator": Task(
        "def unique(xs):\n    seen = set()\n    for x in xs:\n        if x not in seen:\n            seen.add(x)\n            yield x",
        "assert list(unique([1, 2, 1])) == [1, 2]\nassert next(unique('ab')) == 'a'\nassert sorted(unique('ba')) == ['a', 'b']",
    ),
    "a map and a zip": Task(
        "def doubled(xs): return map(lambda x: 2 * x, xs)\ndef paired(a, b): return zip(a, b)",
        "assert list(doubled([1, 2])) == [2, 4]\nassert dict(paired('ab', (1, 2))) == {'a': 1, 'b': 2}",
    ),
    "views of a dict": Task(
        "def names(d): return d.keys()\ndef sums(d): return d.values()\ndef all_of(d): return d.items()",
        "d = {'a': 1, 'b': 2}\nassert names(d) == {'a', 'b'}\nassert sum(sums(d)) == 3\nassert list(all_of(d)) == [('a', 1), ('b', 2)]",
    ),
    "a range": Task(
        "def below(n): return range(n)", "assert below(3) == range(3)\nassert len(below(10 ** 12)) == 10 ** 12"
    ),
    "complex numbers": Task(
        "import cmath\ndef polar(a, b): return cmath.polar(complex(a, b))\ndef conjugate(z): return z.conjugate()",
        "import math\nassert math.isclose(polar(3, 4)[0], 5.0)\nassert conjugate(1 + 2j) == 1 - 2j",
    ),
    "infinity": Task(
        "def best(xs): return max(xs, default=float('-inf'))\ndef no_number(): return float('nan')",
        "import math\nassert best([]) == float('-inf')\nassert math.isnan(no_number())\nassert best([1, math.inf]) == math.inf",
    ),
    "closeness by math": Task(
        "def volume(r): return 4 / 3 * 3.141592653589793 * r ** 3",
        "import math\nassert math.isclose(volume(10), 4188.790204786391, rel_tol=0.001)\nassert round(volume(1), 2) == 4.19",
    ),
    "a chain of comparisons": Task(
        "import random\ndef roll(seed): return random.Random(seed).randint(1, 6)",
        "assert 1 <= roll(3) <= 6\nassert all(1 <= roll(n) < 7 for n in range(20))\nassert roll(1) == roll(1)",
    ),
    "one of several": Task(
        "def any_prime(): return 7", "assert any_prime() in (2, 3, 5, 7)\nassert any_prime() not in [4]"
    ),
    "length and slices": Task(
        "def chunks(xs, n): return [xs[i:i + n] for i in range(0, len(xs), n)]",
        "assert len(chunks(list(range(10)), 3)) == 4\nassert chunks('abcd', 3)[-1] == 'd'\nassert chunks([1, 2], 2)[0][:1] == [1]",
    ),
    "methods of texts": Task(
        "def title(s): return s.title()",
        "assert title('ab cd').split() == ['Ab', 'Cd']\nassert title('x').lower() == 'x'",
    ),
    "types": Task(
        "def parse(s): return int(s) if s.isdigit() else s",
        "assert isinstance(parse('5'), int)\nassert type(parse('x')) is str\nassert type(parse('5')) == int",
    ),
    "bytes": Task("def raw(s): return s.encode()", "assert raw('é') == b'\\xc3\\xa9'\nassert raw('a').hex() == '61'"),
    "dates": Task(
        "from datetime import date, timedelta\ndef after(d, n): return d + timedelta(days=n)\ndef between(a, b): return b - a",
        "from datetime import date, timedelta\nassert after(date(2024, 2, 28), 2) == date(2024, 3, 1)\n"
        "assert between(date(2024, 1, 1), date(2024, 1, 8)) == timedelta(7)",
    ),
    "fractions and decimals": Task(
        "from decimal import Decimal\nfrom fractions import Fraction\ndef third(): return Fraction(1, 3)\n"
        "def price(x): return Decimal(x) * 2",
        "from decimal import Decimal\nfrom fractions import Fraction\nassert third() == Fraction(1, 3)\n"
        "assert price('1.10') == Decimal('2.20')\nassert third().denominator == 3",
    ),
    "variables before": Task(
        "def merged(a, b): return {**a, **b}",
        "one = {'a': 1}\ntwo = {'b': 2}\nexpected = {'a': 1, 'b': 2}\nassert merged(one, two) == expected\nassert one == {'a': 1}",
    ),
    "a list sorted in place": Task("def bubble(xs): xs.sort()", "xs = [3, 1, 2]\nbubble(xs)\nassert xs == [1, 2, 3]"),
    "a board turned in place": Task(
        "def turn(b): b[:] = [list(r) for r in zip(*b[::-1])]",
        "board = [[1, 2], [3, 4]]\nassert turn(board) is None\nassert board == [[3, 1], [4, 2]]",
    ),
    "rows changed in place": Task(
        "def clear(b):\n    for row in b:\n        row[0] = 0",
        "board = [[1, 2], [3, 4]]\nclear(board)\nassert board == [[0, 2], [0, 4]]",
    ),
    "a dict and a set changed in place": Task(
        "def take(d, s, key=None):\n    d.pop(key, None)\n    s.add(key)",
        "d, s = {'a': 1, 'b': 2}, set()\ntake(d, s, key='a')\nassert d == {'b': 2} and s == {'a'}",
    ),
    "a list that stays as it was": Task(
        "def ordered(xs): return sorted(xs)", "xs = [2, 1]\nassert ordered(xs) == [1, 2]\nassert xs == [2, 1]"
    ),
    "a constant of the solution": Task(
        "LIMIT = 7\nTABLE = {'a': [1]}\ndef over(n): return n > LIMIT",
        "assert LIMIT == 7 and TABLE['a'] == [1]\nassert over(8)",
    ),
    "the solution's own sum": Task(
        "def sum(a, b): return len([d for d in range(1, min(a, b) + 1) if a % d == 0 == b % d])",
        "assert candidate.sum(10, 15) == 2",
    ),
    "results as arguments": Task(
        "def push(xs, x): return xs + [x]\ndef top(xs): return xs[-1]",
        "stack = push(push([], 1), 2)\nassert top(stack) == 2\nassert stack == [1, 2]",
    ),
    "an iterator as an argument": Task(
        "def pairs(xs): return list(zip(xs, xs))",
        "assert pairs(iter([1, 2, 3, 4])) == [(1, 2), (3, 4)]\nassert pairs(c for c in 'ab') == [('a', 'b')]",
    ),
}
RAISING: dict[str, Task] = {
    "try and else": Task(
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        "try:\n    root(-1)\nexcept ValueError as e:\n    assert str(e) == 'negative'\nelse:\n    assert False, 'it must raise'",
    ),
    "try and a flag": Task(
        "def take(d, k): return d[k]",
        "raised = False\ntry:\n    take({}, 'x')\nexcept KeyError as e:\n    raised = e.args == ('x',)\nassert raised",
    ),
    "an exception of its own": Task(
        "class TooLow(ValueError): pass\ndef root(x):\n    if x < 0: raise TooLow('negative', x)",
        "try:\n    root(-1)\nexcept ValueError as e:\n    assert e.args == ('negative', -1)\nelse:\n    raise AssertionError",
    ),
    "pytest": Task(
        "def divide(a, b): return a / b",
        "import pytest\nwith pytest.raises(ZeroDivisionError, match='division'):\n    divide(1, 0)\n"
        "assert divide(1, 3) == pytest.approx(0.3333, abs=1e-3)",
    ),
    "unittest": Task(
        "def divide(a, b): return a / b",
        "import unittest\nclass T(unittest.TestCase):\n    def runTest(self):\n        self.assertAlmostEqual(divide(1, 3), 0.3333, places=4)\n"
        "        self.assertRaises(ZeroDivisionError, divide, 1, 0)\n        self.assertCountEqual([divide(2, 1)], [2.0])\n"
        "result = T().run()\nassert result.wasSuccessful()",
    ),
    "contextlib": Task(
        "def whole(s): return int(s)",
        "from contextlib import suppress\nseen = []\nwith suppress(ValueError):\n    whole('x')\n    seen.append(1)\n"
        "assert seen == [] and whole('7') == 7",
    ),
    "what it prints": Task(
        "def greet(name): print(f'Hello, {name}!')",
        "import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\nwith redirect_stdout(out):\n    greet('Ann')\n"
        "assert out.getvalue() == 'Hello, Ann!\\n'",
    ),
    "an array": Task(
        "import numpy as np\ndef table(n): return np.outer(np.arange(n), np.arange(n)).astype(float)\ndef mean(a): return a.mean()",
        "import numpy as np\nassert table(3).shape == (3, 3)\nassert np.allclose(table(3)[2], [0, 2, 4])\n"
        "assert mean(np.array([1.0, 2.0])) == 1.5\nassert np.array_equal(table(2), np.array([[0, 0], [0, 1]]))",
    ),
    "an array changed in place": Task(
        "def double(a): a *= 2", "import numpy as np\na = np.array([[1, 2]])\ndouble(a)\nassert a.tolist() == [[2, 4]]"
    ),
}
JUDGED = {**CHECKED, **ASSERTED, **RAISING}


class Unjudged(NamedTuple):
    task: Task
    sentence: str
    """What is said: when the test is read, or else as the reason why it failed."""

    is_refused: bool
    instead: str
    """The test that asks for the same with values."""


STACK = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()"
NODE = "class Node:\n    def __init__(self, value, left=None, right=None): self.value, self.left, self.right = value, left, right\n"
UNJUDGED: dict[str, Unjudged] = {
    "a class of the solution": Unjudged(
        Task(STACK, "s = Stack()\ns.push(1)\nassert s.pop() == 1"),
        "s.push: no value has a 'push'",
        True,
        "in_candidate('s = Stack()')\nin_candidate('s.push(1)')\nassert in_candidate('s.pop()') == 1",
    ),
    "a class in one line": Unjudged(
        Task(STACK, "assert Stack().items == []"),
        "which is no value",
        False,
        "assert in_candidate('Stack().items') == []",
    ),
    "objects in a list": Unjudged(
        Task(
            "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef longest(ps): return max(p.b - p.a for p in ps)",
            "assert longest([Pair(1, 5), Pair(2, 3)]) == 4",
        ),
        r"Pair\(…\) gives an object of class Pair, which is no value",
        False,
        "assert in_candidate('longest([Pair(1, 5), Pair(2, 3)])') == 4",
    ),
    "a tree of the solution": Unjudged(
        Task(
            NODE + "def height(n): return 0 if n is None else 1 + max(height(n.left), height(n.right))",
            "root = Node(1)\nroot.left = Node(2)\nassert height(root) == 2",
        ),
        "root.left: no value has a 'left'",
        True,
        "assert in_candidate('height(Node(1, Node(2)))') == 2",
    ),
    "a tree of the test": Unjudged(
        Task(
            "def height(n): return 0 if n is None else 1 + max(height(n.left), height(n.right))",
            NODE + "assert height(Node(1, Node(2))) == 2",
        ),
        "an object of the test is no value",
        True,
        f"in_candidate({NODE!r})\nassert in_candidate('height(Node(1, Node(2)))') == 2",
    ),
    "a lambda": Unjudged(
        Task("def apply(f, xs): return [f(x) for x in xs]", "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]"),
        "a function is no value",
        True,
        "assert in_candidate('apply(lambda x: x + 1, [1, 2])') == [2, 3]",
    ),
    "a function of the test": Unjudged(
        Task("def twice(f, x): return f(f(x))", "def inc(x): return x + 1\nassert twice(inc, 1) == 3"),
        "a function is no value",
        True,
        "assert in_candidate('twice(lambda x: x + 1, 1)') == 3",
    ),
    "a function of Python": Unjudged(
        Task("def apply(f, xs): return f(xs)", "assert apply(len, [1, 2]) == 2"),
        "len is no value",
        True,
        "assert in_candidate('apply(len, [1, 2])') == 2",
    ),
    "a function as a result": Unjudged(
        Task("def adder(n): return lambda x: x + n", "assert adder(2)(3) == 5"),
        r"adder\(…\) gives an object of class function, which is no value",
        False,
        "assert in_candidate('adder(2)(3)') == 5",
    ),
    "an exception of the solution by name": Unjudged(
        Task(
            "class TooLow(ValueError): pass\ndef f(): raise TooLow('x')",
            "try:\n    f()\nexcept TooLow:\n    pass\nelse:\n    assert False",
        ),
        "TooLow: a class of the code is not known to the test. Of an exception, write the class of Python's",
        True,
        "try:\n    f()\nexcept ValueError:\n    pass\nelse:\n    assert False",
    ),
    "a coroutine": Unjudged(
        Task("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
        "a coroutine is no value",
        True,
        "assert in_candidate('import asyncio\\nasyncio.run(f(1))') == 2",
    ),
    "a context manager": Unjudged(
        Task(
            "class M:\n    def __enter__(self): return 5\n    def __exit__(self, *_): return None",
            "with M() as five:\n    assert five == 5",
        ),
        "a value is no context manager",
        True,
        "in_candidate('with M() as five: pass')\nassert in_candidate('five') == 5",
    ),
    "an enumeration": Unjudged(
        Task("from enum import Enum\nclass Colour(Enum): RED = 1", "assert Colour.RED.value == 1"),
        "Colour.RED: no value has a 'RED'",
        True,
        "assert in_candidate('Colour.RED.value') == 1",
    ),
    "an endless generator": Unjudged(
        Task(
            "def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1",
            "from itertools import islice\nassert list(islice(naturals(), 3)) == [0, 1, 2]",
        ),
        r"naturals\(…\) gives an iterator over more than 1,000,000 items, which is no value",
        False,
        "in_candidate('from itertools import islice')\nassert in_candidate('list(islice(naturals(), 3))') == [0, 1, 2]",
    ),
    "a module that is not imported": Unjudged(
        Task("import math\ndef area(r): return math.pi * r", "assert math.isclose(area(1), 3.14159, abs_tol=1e-4)"),
        "a test imports what it uses",
        True,
        "import math\nassert math.isclose(area(1), 3.14159, abs_tol=1e-4)",
    ),
}
