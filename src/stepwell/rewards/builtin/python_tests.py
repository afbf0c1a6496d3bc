"""Unit tests of generated Python: the share of the tests that pass.

- The code runs in one sandbox, each test in another. They exchange values, as JSON (rewards/candidate): the code never
  sees a test or what it expects, and no object of one is known to the other. The verdict is that of the test's process,
  which runs nothing of the code.
- Code that fails, hangs, crashes, attacks or is missing fails its tests, which gives a score. If the tests
  themselves want more than values, or the sandboxes cannot run, that is an error and no score.
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from stepwell.errors import RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin.matching import answer_of, expected_of, last_block
from stepwell.rewards.confinement.process import ConfinedProcess
from stepwell.rewards.confinement.sandbox import Sandbox, SandboxLevel, open_sandbox
from stepwell.rewards.sample import Sample

SHOWN = 5
"""Failures in the notes."""
ENDED = "ended before the test did"
TOO_LATE = "not run: the time for all tests was up"


def python_tests(
    level: SandboxLevel,
    *,
    tests_key: str = "tests",
    seconds: float = 4.0,
    seconds_in_all: float = 20.0,
    memory_mb: int = 512,
    zero_if_not_run: bool = False,
) -> Callable[[Sample], Score]:
    """The code is the answer's last fenced block; the tests are Python source in the metadata, a list or by name.

    A test passes if it raises nothing. `seconds` limits one test; tests that have not begun after `seconds_in_all` of
    running others fail. With `zero_if_not_run`, a test that the machine could not run has failed, instead of
    being an error.
    """
    run = TestRun(open_sandbox(level), seconds=seconds, memory_mb=memory_mb)

    def score(sample: Sample) -> Score:
        tests = _tests(sample, tests_key)
        code = last_block(answer_of(sample))
        if code is None:
            return Score(0.0, parts=dict.fromkeys(tests, 0.0), notes="the answer has no fenced block of code")
        failures, spent = {}, 0.0
        for name, test in tests.items():
            failures[name], took = attempt(code, test) if spent <= seconds_in_all else (TOO_LATE, 0.0)
            spent += took
        return _scored(failures)

    def attempt(code: str, test: str) -> tuple[str, float]:
        try:
            return run.why_failed(code, test)
        except RewardFailed as failure:
            if zero_if_not_run:
                return f"not run: {failure}", 0.0
            raise

    return score


@dataclass(frozen=True, slots=True)
class TestRun:
    """Runs tests, each with a new process of the code."""

    __test__ = False

    sandbox: Sandbox
    seconds: float
    memory_mb: int

    def why_failed(self, code: str, test: str) -> tuple[str, float]:
        """Empty if the test passed; and the seconds that it ran. RewardFailed if it could not be run."""
        ours, theirs = socket.socketpair()
        with ours, theirs, self._start("candidate_main", theirs) as candidate, self._start("judge_main", ours) as judge:
            ours.close()
            theirs.close()
            candidate.wait_until_ready()
            judge.wait_until_ready()
            began = time.monotonic()
            judge.send(json.dumps({"code": code, "test": test}).encode())
            output = judge.read_output(began + self.seconds)
            took = time.monotonic() - began
            return self._verdict(output, candidate, is_late=took >= self.seconds), took

    def _start(self, program: str, channel: socket.socket) -> ConfinedProcess:
        return self.sandbox.start(program, seconds=self.seconds, memory_mb=self.memory_mb, channel=channel.fileno())

    def _verdict(self, output: bytes, candidate: ConfinedProcess, *, is_late: bool) -> str:
        if is_late:
            return "timed out"
        try:
            verdict: dict[str, object] = json.loads(output)
        except ValueError:
            return "the process of the test ended"
        if "broken" in verdict:
            raise RewardFailed(f"the test cannot be run: {verdict['broken']}")
        if verdict.get("passed") is True:
            return ""
        why = str(verdict.get("failed"))
        return f"{why}, with {candidate.end_text()}" if why == ENDED else why


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
