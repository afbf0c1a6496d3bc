"""Mathematical equality, by math-verify: 1/2, 0.5 and \\frac{1}{2} are equal."""

import logging
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from stepwell.common.imports import require
from stepwell.errors import NotReady, RewardFailed
from stepwell.rewards.builtin.matching import ANSWER, answer_of, compiled, expected_texts
from stepwell.rewards.sample import Sample

LONGEST_ANSWER = 20_000
"""Characters; of a longer answer, the end is read."""
EQUAL = "equal"
WALL_FACTOR = 4.0
"""The factor by which a call may exceed its CPU seconds on a busy machine."""
MOST_BYTES = 10_000
RETURNED = "returned "


def math_equal(
    *, answer_key: str = ANSWER, extract: str | None = None, seconds: float = 5.0
) -> Callable[[Sample], float]:
    """1 if the answer's expression equals an expected one. An expression in \\boxed{…} is preferred.

    An unreadable expected answer is an error; an unreadable answer is wrong. So is one whose comparison fails or takes
    more than so many `seconds` of a CPU.
    """
    engine = require("math_verify", "rewards", purpose="math_equal", error=NotReady)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set
    pattern = compiled(extract) if extract else None

    def score(sample: Sample) -> float:
        expected = [_expected(engine, sample, text) for text in expected_texts(sample, answer_key)]
        text = answer_of(sample, pattern)[-LONGEST_ANSWER:]
        return float(bounded_call(lambda: _compared(engine, expected, text), cpu_seconds=seconds) == EQUAL)

    return score


def _compared(engine: Any, expected: list[list[Any]], text: str) -> str:
    answer = _read(engine, text)
    if not answer:
        return ""
    equal = any(engine.verify(each, answer, timeout_seconds=None, raise_on_error=True) for each in expected)
    return EQUAL if equal else ""


def _expected(engine: Any, sample: Sample, text: str) -> list[Any]:
    """Reads the expected value as LaTeX between dollar signs, or as plain text."""
    read = _read(engine, f"${text}$") or _read(engine, text)
    if not read:
        raise RewardFailed(f"trajectory {sample.trajectory_uid!r} expects {text!r}, which math-verify cannot read")
    return read


def _read(engine: Any, text: str) -> list[Any]:
    read: list[Any] = engine.parse(text, parsing_timeout=None, fallback_mode="no_fallback")
    return read


def bounded_call(function: Callable[[], str], *, cpu_seconds: float) -> str | None:
    """The function's result; None if it raised, took too long, or ended its process.

    The time limit holds whatever the call does: it runs in a fork of this process, which can be killed. Neither signals
    nor checks of the text reliably end calculations whose cost nobody can tell beforehand, such as 9^9^9^9.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _run_and_exit(function, write_end, cpu_seconds)
    os.close(write_end)
    try:
        answer = _read_answer(read_end, time.monotonic() + WALL_FACTOR * cpu_seconds)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return answer.removeprefix(RETURNED) if answer.startswith(RETURNED) else None


def _run_and_exit(function: Callable[[], str], write_end: int, cpu_seconds: float) -> None:
    try:
        seconds = math.ceil(cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        os.write(write_end, f"{RETURNED}{function()}".encode()[:MOST_BYTES])
    finally:
        os._exit(0)


def _read_answer(descriptor: int, deadline: float) -> str:
    data = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(descriptor, MOST_BYTES)
        if not chunk:
            return data.decode(errors="replace")
        data += chunk
    return ""
