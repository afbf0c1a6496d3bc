"""Unit tests of generated Python: the share of the tests that pass.

- Code that fails, hangs, crashes or is missing fails its tests, which gives a score. If the tests themselves cannot
  run, that is an error and no score.
- Each test runs with the code in its own process (confinement.py says how isolated that is). A class whose objects
  equal everything passes no test (candidate_main.py). Malicious code shares the process with its test and can cheat:
  inspect high scores of code that reads its caller's frames.
"""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from stepwell.errors import RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin import candidate_main as candidate
from stepwell.rewards.builtin.answers import answer_of, expected_of, last_block
from stepwell.rewards.builtin.confinement import ConfinedRun, run_confined
from stepwell.rewards.sample import Sample

MEGABYTE = 2**20
FILE_BYTES = 16 * MEGABYTE
PROCESSES = 64
OPEN_FILES = 64
SHOWN = 5
"""Failures in the notes."""


def python_tests(
    *, tests_key: str = "tests", seconds: float = 4.0, seconds_in_all: float = 20.0, memory_mb: int = 512
) -> Callable[[Sample], Score]:
    """The code is the answer's last fenced block; the tests are Python source in the metadata, a list or by name.

    A test passes if it raises nothing. `seconds` limits one test; tests that have not begun after `seconds_in_all`
    fail.
    """

    def score(sample: Sample) -> Score:
        tests = _tests(sample, tests_key)
        code = last_block(answer_of(sample))
        if code is None:
            return Score(0.0, parts=dict.fromkeys(tests, 0.0), notes="the answer has no fenced block of code")
        deadline = time.monotonic() + seconds_in_all
        return _scored({name: _failure(code, test, deadline) for name, test in tests.items()})

    def _failure(code: str, test: str, deadline: float) -> str:
        if time.monotonic() > deadline:
            return "not run: the time for all tests was up"
        return why_failed(code, test, seconds=seconds, memory_mb=memory_mb)

    return score


def why_failed(code: str, test: str, *, seconds: float, memory_mb: int) -> str:
    """Empty if the test passed."""
    passed = secrets.token_hex(16)
    job = {"code": code, "test": test, "passed": passed, "limits": _limits(seconds, memory_mb)}
    run = run_confined(Path(candidate.__file__), orjson.dumps(job), seconds=seconds)
    if not run.output.startswith(candidate.READY):
        raise RewardFailed(f"a test could not be run (code {run.code}): {run.errors or 'it did not start in time'}")
    verdict = run.output.removeprefix(candidate.READY)
    return "" if verdict == passed.encode() else _failure_of(run, verdict)


def _failure_of(run: ConfinedRun, verdict: bytes) -> str:
    if verdict.startswith(candidate.FAILED):
        return verdict.removeprefix(candidate.FAILED).decode(errors="replace")
    return "timed out" if run.timed_out else f"ended before the test did, with code {run.code}"


def _limits(seconds: float, memory_mb: int) -> dict[str, int]:
    return {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_AS": memory_mb * MEGABYTE,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NPROC": PROCESSES,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
    }


def _tests(sample: Sample, key: str) -> dict[str, str]:
    given = expected_of(sample, key)
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list):
        given = {f"test {number}": test for number, test in enumerate(given, start=1)}
    if not isinstance(given, dict) or not given or not all(isinstance(test, str) for test in given.values()):
        raise RewardFailed(f"trajectory {sample.trajectory_uid!r}: {key!r} holds no tests; a test is Python source")
    return given


def _scored(failures: dict[str, str]) -> Score:
    parts = {name: float(not why) for name, why in failures.items()}
    failed = [f"{name}: {why}" for name, why in failures.items() if why]
    notes = "\n".join([f"{len(failed)} of {len(parts)} tests failed", *failed[:SHOWN]]) if failed else ""
    return Score(sum(parts.values()) / len(parts), parts=parts, notes=notes)
