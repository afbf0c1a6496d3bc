"""Real child processes, and functions that do to them whatever a function can do."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rig.vocabulary import encode
from rig.waiting import until, wait_until
from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import JudgementOutcome, Score
from stepwell.rewards.runner.messages import LONGEST_OUTPUT, Job
from stepwell.rewards.runner.runner import RewardRunner
from tests.unit.rewards.samples import job, sample

SHORT = 2.0
"""Seconds for a call that is meant to run out of time."""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def child_pids(runner: RewardRunner) -> set[int]:
    attempts = await asyncio.gather(*(runner.run(sample("pid")) for _ in range(20)))
    return {int(attempt.score.value) for attempt in attempts if attempt.score}


FAILURES = {
    "segfault": "died: signal 11 \\(SIGSEGV\\).*in <lambda>",
    "kill": "died: signal 9 \\(SIGKILL\\)",
    "exit": "died: exit code 3",
    "system_exit": "SystemExit",
    "raise": "ValueError: cannot read this \\(graders.py, line \\d+, in raises\\); it printed:\nabout to fail",
    "allocate": "MemoryError",
    "nan": "it returned nan, which is no reward",
    "infinite": "as part 'style' it returned inf",
    "text": "it returned a str \\('0.5'\\); a reward function returns a float or a Score",
    "nothing": "it returned None",
    "short": "2 step rewards for a trajectory of 1 steps",
    "read": "no tokenizer; give --tokenizer-path",
}


@pytest.mark.parametrize("function", ["graded", "graded_async"])
async def test_every_failure_is_an_error_in_words_and_costs_no_other_sample_its_score(function: str) -> None:
    async with RewardRunner(job(function)) as runner:
        samples = [sample(way, metadata={"answer": "?"}) for way in FAILURES]
        innocent = [runner.run(sample()) for _ in range(40)]
        attempts = await asyncio.gather(*(runner.run(s) for s in samples), *innocent)
    for (way, words), attempt in zip(FAILURES.items(), attempts, strict=False):
        assert attempt.outcome is JudgementOutcome.ERROR, way
        assert attempt.score is None
        assert re.search(words, attempt.why, re.DOTALL), attempt.why
    assert [a.score for a in attempts[len(FAILURES) :]] == [Score(1.0)] * 40


async def test_a_call_that_runs_when_its_process_must_leave_is_not_blamed_for_that() -> None:
    async with RewardRunner(job("graded_async", children=1)) as runner:
        starved, bystander = await asyncio.gather(runner.run(sample("allocate")), runner.run(sample("nap")))
    assert starved.outcome is JudgementOutcome.ERROR
    assert bystander.score == Score(1.0), bystander.why


@pytest.mark.parametrize("way", ["loop", "backtrack"])
async def test_a_call_without_end_times_out_and_no_other(way: str) -> None:
    async with RewardRunner(job(timeout=SHORT)) as runner:
        endless, *others = await asyncio.gather(
            runner.run(sample(way)), *(runner.run(sample("fine")) for _ in range(100))
        )
    assert endless.outcome is JudgementOutcome.TIMEOUT
    assert endless.why.startswith(f"it took longer than {SHORT:g} s and was killed")
    assert endless.seconds >= SHORT
    assert {attempt.outcome for attempt in others} == {JudgementOutcome.SCORE}


async def test_fast_calls_sent_together_with_one_without_end_are_called_again() -> None:
    async with RewardRunner(job(children=1, timeout=SHORT)) as runner:
        await asyncio.gather(*(runner.run(sample()) for _ in range(200)))  # by now it is given many at once
        attempts = await asyncio.gather(*(runner.run(sample("loop" if n == 5 else "fine")) for n in range(100)))
    assert [n for n, attempt in enumerate(attempts) if attempt.outcome is not JudgementOutcome.SCORE] == [5]
    assert attempts[5].outcome is JudgementOutcome.TIMEOUT
    assert attempts[5].why.endswith("it printed:\nround and round")


@pytest.mark.parametrize(("endless", "stalled"), [(1, "loop"), (3, "loop"), (1, "backtrack")])
async def test_fast_calls_do_not_wait_for_stalled_ones_even_if_those_hold_every_child(
    endless: int, stalled: str
) -> None:
    async with RewardRunner(job(children=2, timeout=600.0)) as runner:
        await asyncio.gather(*(runner.run(sample()) for _ in range(200)))
        ways = [stalled if n in range(5, 64 * endless, 64) else "fine" for n in range(64 * endless)]
        calls = [(way, asyncio.create_task(runner.run(sample(way)))) for way in ways]
        async with asyncio.timeout(300):
            attempts = await asyncio.gather(*(call for way, call in calls if way == "fine"))
        assert {attempt.outcome for attempt in attempts} == {JudgementOutcome.SCORE}
        assert not any(call.done() for way, call in calls if way == stalled)


async def test_what_was_taken_back_from_a_stalled_child_is_called_once_and_a_child_too_many_leaves(
    tmp_path: Path,
) -> None:
    calls = tmp_path / "calls"
    async with RewardRunner(job(children=1)) as runner:
        await asyncio.gather(*(runner.run(sample()) for _ in range(200)))
        ways = ["wait", *["note"] * 60]
        attempts = await asyncio.gather(*(runner.run(sample(way, metadata={"path": str(calls)})) for way in ways))
        await until(lambda: len(runner._lanes) == 1, "the child that had stalled to leave")
        assert len(await child_pids(runner)) == 1
    assert {attempt.outcome for attempt in attempts} == {JudgementOutcome.SCORE}
    assert calls.read_text() == "called\n" * 60


async def test_a_thousand_slow_async_calls_run_at_the_same_time() -> None:
    async with RewardRunner(job("graded_async", calls=1_000)) as runner:
        async with asyncio.timeout(60.0):
            attempts = await asyncio.gather(*(runner.run(sample("slow")) for _ in range(1_000)))
    assert {attempt.outcome for attempt in attempts} == {JudgementOutcome.SCORE}


@pytest.mark.parametrize(("way", "end"), [("never", "cancelled"), ("stubborn", "killed"), ("loop", "killed")])
async def test_an_async_call_over_its_time_is_stopped_and_only_it_times_out(way: str, end: str) -> None:
    async with RewardRunner(job("graded_async", timeout=SHORT, children=1)) as runner:
        late, *others = await asyncio.gather(runner.run(sample(way)), *(runner.run(sample("slow")) for _ in range(50)))
    assert late.outcome is JudgementOutcome.TIMEOUT
    assert late.why.startswith(f"it took longer than {SHORT:g} s and was {end}")
    assert {attempt.outcome for attempt in others} == {JudgementOutcome.SCORE}


async def test_a_score_comes_back_whole() -> None:
    async with RewardRunner(job()) as runner:
        attempt = await runner.run(sample("whole"))
    assert attempt.score == Score(0.5, {"style": 1.0, "facts": 1.0}, (0.25,), "well done")
    assert runner.name == "graders.py:graded"


async def test_a_child_that_has_run_out_of_memory_is_replaced() -> None:
    async with RewardRunner(job(children=1, memory_mb=500)) as runner:
        outcomes = [(await runner.run(sample("leak"))).outcome for _ in range(5)]
    score, error = JudgementOutcome.SCORE, JudgementOutcome.ERROR
    assert outcomes == [score, score, error, score, score]


async def test_texts_are_decoded_in_the_child(tiny_model: Path) -> None:
    async with RewardRunner(job(children=1, tokenizer_path=str(tiny_model))) as runner:
        response = [*encode("forty-two"), *encode("<|im_end|>")]
        attempt = await runner.run(sample("read", response_ids=response, metadata={"answer": "forty-two"}))
    assert attempt.score == Score(1.0)


async def test_a_child_is_kept_for_many_calls_and_one_killed_from_outside_is_replaced() -> None:
    async with RewardRunner(job(children=1)) as runner:
        (first,) = await child_pids(runner)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_alive(first), "the child to be gone")
        (second,) = await child_pids(runner)
    assert second != first
    assert not is_alive(second)


async def test_a_death_that_cannot_be_put_down_to_a_call_is_an_error_after_some_tries() -> None:
    async with RewardRunner(job("graded_async", children=1)) as runner:
        attempt = await runner.run(sample("thread"))
    assert attempt.outcome is JudgementOutcome.ERROR
    assert attempt.why.startswith("its process died: signal 11 (SIGSEGV)")


async def test_what_a_killed_call_had_started_is_killed_too() -> None:
    async with RewardRunner(job(children=1, timeout=SHORT)) as runner:
        attempt = await runner.run(sample("process"))
    assert attempt.outcome is JudgementOutcome.TIMEOUT
    pid = int(attempt.why.rpartition("pid ")[2])
    await until(lambda: not is_alive(pid), "the grandchild to be gone")


async def test_output_without_end_is_bounded_and_keeps_no_other_score_waiting() -> None:
    async with RewardRunner(job(timeout=SHORT)) as runner:
        printing, *others = await asyncio.gather(
            runner.run(sample("print")), *(runner.run(sample()) for _ in range(100))
        )
    assert printing.outcome is JudgementOutcome.TIMEOUT
    assert "Jack" in printing.why
    assert len(printing.why) < LONGEST_OUTPUT + 200
    assert {attempt.outcome for attempt in others} == {JudgementOutcome.SCORE}


async def test_a_sample_nobody_waits_for_any_more_is_not_called_for(tmp_path: Path) -> None:
    touched, untouched = tmp_path / "touched", tmp_path / "untouched"
    async with RewardRunner(job(children=1, timeout=SHORT)) as runner:
        endless = asyncio.create_task(runner.run(sample("loop")))
        unwanted = asyncio.create_task(runner.run(sample("touch", metadata={"path": str(untouched)})))
        await asyncio.sleep(0)
        unwanted.cancel()
        await runner.run(sample("touch", metadata={"path": str(touched)}))
        assert (await endless).outcome is JudgementOutcome.TIMEOUT
    assert touched.exists()
    assert not untouched.exists()


async def test_an_urgent_sample_goes_before_those_that_wait() -> None:
    order: list[str] = []

    async def run(name: str, way: str, urgent: bool = False) -> None:
        await runner.run(sample(way), urgent=urgent)
        order.append(name)

    async with RewardRunner(job(children=1, timeout=SHORT)) as runner:
        ordinary = [asyncio.create_task(run("endless", "loop"))]
        ordinary += [asyncio.create_task(run("waiting", "fine")) for _ in range(3)]
        await asyncio.sleep(0)
        await run("urgent", "fine", urgent=True)
        await asyncio.gather(*ordinary)
    assert order.index("urgent") < order.index("waiting")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found' \\(bad.py, line 1"),
        ("def score(sample:", "SyntaxError"),
        ("raise RuntimeError('no key')", "RuntimeError: no key"),
        ("import ctypes; ctypes.string_at(0)", "ended the process: signal 11 \\(SIGSEGV\\)"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
        ("x = bytearray(10 * 2**30)", "MemoryError"),
    ],
)
async def test_a_function_that_cannot_be_imported_is_told_at_the_start(code: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(BadRequest, match=words):
        await RewardRunner(Job(function="bad.py:score", folder=str(tmp_path))).start()


async def test_a_function_that_is_gone_later_is_an_error_for_who_asks_and_not_a_wait(tmp_path: Path) -> None:
    file = tmp_path / "gone.py"
    file.write_text("import os\ndef score(sample): os._exit(1)")
    async with RewardRunner(Job(function=str(file) + ":score", children=1)) as runner:
        file.unlink()
        assert "exit code 1" in (await runner.run(sample())).why
        attempt = await runner.run(sample())
    assert attempt.outcome is JudgementOutcome.ERROR
    assert "there is no file" in attempt.why


PARENT = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from stepwell.rewards.runner.runner import RewardRunner
from tests.unit.rewards.samples import job, sample

async def main():
    async with RewardRunner(job(children=1)) as runner:
        print(int((await runner.run(sample("pid"))).score.value), flush=True)
        await runner.run(sample("loop"))

asyncio.run(main())
"""


def test_no_child_outlives_its_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    wait_until(lambda: not is_alive(child), "the child to be gone")
