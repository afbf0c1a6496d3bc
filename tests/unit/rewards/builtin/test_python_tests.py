"""python_tests: the candidate's failures are scored, the harness's own are errors."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin import candidate_main as candidate
from stepwell.rewards.builtin.confinement import Confinement, run_confined, strongest
from stepwell.rewards.loading import load
from tests.rig.waiting import wait_until
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
    test = "import os, sys\nassert 'SECRET' not in os.environ\nassert os.listdir('.') == []\nopen('x', 'w').write('1')"
    assert score(ADD, [test, test]).value == 1.0


def test_code_has_no_network_where_namespaces_are_allowed() -> None:
    if not strongest().prefix:
        pytest.skip("this machine allows no namespaces")
    given = score("import socket; socket.create_connection(('127.0.0.1', 9))", ["pass"])
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


def test_a_harness_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as broken:  # pytest's own folder is closed to nobody
        Path(broken.name).chmod(0o644)
        broken.write("raise Exception('no harness')")
        broken.flush()
        monkeypatch.setattr(candidate, "__file__", broken.name)
        with pytest.raises(RewardFailed, match="no harness"):
            score(ADD, ["pass"])


def test_a_program_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RewardFailed, match="could not be run"):
        score(ADD, ["pass"])


def test_what_a_program_leaves_behind_is_ended_without_namespaces_too(tmp_path: Path) -> None:
    program = tmp_path / "leaves.py"
    program.write_text("import os, time\nif os.fork() == 0: time.sleep(60)\nprint(os.getpid(), flush=True)")
    ended = run_confined(program, b"", seconds=20, confinement=Confinement("nothing"))
    assert ended.code == 0
    wait_until(lambda: str(program) not in commands(), "what it left behind to be gone")


def commands() -> str:
    """Of all processes."""
    return subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, text=True, check=True).stdout


def test_the_limits_of_whoever_runs_the_tests_are_not_exceeded(tmp_path: Path) -> None:
    """A worker's child has a memory limit of its own, which its children inherit and cannot raise."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "from stepwell.rewards.builtin.python_tests import why_failed\n"
        "print(repr(why_failed('', 'pass', seconds=4, memory_mb=4096)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert (done.stdout, done.stderr) == ("''\n", "")
