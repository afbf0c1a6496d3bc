"""Reward functions on stored trajectories, without a pool and without Ray: tried, and applied anew.

What always holds: a function runs as it does in a worker, with the same limits; attempts come in the order of the data;
one that failed is told apart from a score, and makes the whole fail once all is done.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import PurePath
from typing import TypeAlias

from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.rewards.attempt import Attempt
from stepwell.rewards.blame import shortened
from stepwell.rewards.rescoring import rescored
from stepwell.rewards.sample import sample_of
from stepwell.rewards.sandbox.job import Job
from stepwell.rewards.sandbox.runner import Runner
from stepwell.steps.parquet import ReadTable, Store, StoredTrajectory

Say: TypeAlias = Callable[[str], None]

HELD = 64
"""Trajectories that may wait for an older one, beyond those that are worked on."""
HELD_BYTES = 2**28
WORDS_SHOWN = 160
"""Characters of what is said of an attempt, in its line."""
LINE = "{:<32}  {:>9}  {:<7}  {:>9}  {:>7}  {}"


class Summary:
    """What came of many attempts."""

    def __init__(self) -> None:
        self._failures: Counter[JudgementOutcome] = Counter()
        self._scored = 0
        self._sum, self._least, self._most = 0.0, float("inf"), float("-inf")

    def add(self, attempt: Attempt) -> None:
        if attempt.score is None:
            self._failures[attempt.outcome] += 1
            return
        value = attempt.score.value
        self._scored += 1
        self._sum += value
        self._least, self._most = min(self._least, value), max(self._most, value)

    def close(self) -> str:
        """One line of words. RewardFailed with the same if there were failures."""
        words = f"{self._scored} scored"
        if self._scored:
            words += f" (mean {self._sum / self._scored:.4g}, from {self._least:.4g} to {self._most:.4g})"
        if self._failures:
            failures = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(self._failures.items()))
            raise RewardFailed(f"{words}; {self._failures.total()} without a score ({failures})")
        return words


async def try_function(job: Job, store: Store, read_table: ReadTable, *, limit: int, say: Say) -> None:
    """A line for each of the first trajectories: the reward it had, and what the function gives."""
    summary = Summary()
    async with Runner(job) as runner:
        say(LINE.format("trajectory", "had", "outcome", "score", "seconds", "").rstrip())
        async for stored, attempt in attempts(runner, islice(store.read(read_table), limit)):
            summary.add(attempt)
            say(_line(stored, attempt))
    say(summary.close())


async def rescore(job: Job, store: Store, target: Store, read_table: ReadTable, *, say: Say) -> None:
    """Every file once more, in the target, under its name, with the function's rewards as the next revision."""
    if target.has_files():
        raise BadRequest(f"{target.url} has Parquet files already; rewards of two functions are not mixed there")
    summary, files = Summary(), store.files()
    async with Runner(job) as runner:
        for file in files:
            with target.writing(PurePath(file).name) as write:
                async for stored, attempt in attempts(runner, store.read_file(file, read_table)):
                    summary.add(attempt)
                    await asyncio.to_thread(write, rescored(stored, attempt, runner.name))
            say(f"wrote {PurePath(file).name}")
    say(summary.close())


async def attempts(
    runner: Runner, trajectories: Iterator[StoredTrajectory]
) -> AsyncIterator[tuple[StoredTrajectory, Attempt]]:
    """One each, in order; many are under way at once, within bounds."""
    under_way: deque[tuple[StoredTrajectory, asyncio.Task[Attempt]]] = deque()
    is_done, held = False, 0
    while under_way or not is_done:
        while not is_done and len(under_way) < HELD + runner.slots and held < HELD_BYTES:
            stored = await asyncio.to_thread(next, trajectories, None)
            if stored is None:
                is_done = True
            else:
                held += stored.table.nbytes
                under_way.append((stored, asyncio.create_task(runner.run(sample_of(stored.steps)))))
        if under_way:
            stored, attempt = under_way.popleft()
            held -= stored.table.nbytes
            yield stored, await attempt


def _line(stored: StoredTrajectory, attempt: Attempt) -> str:
    rewards = [step.reward for step in stored.steps if step.reward is not None]
    had = f"{sum(rewards):.4g}" if rewards else "none"
    value = "" if attempt.score is None else f"{attempt.score.value:.4g}"
    words = " ".join(_words(attempt).split())
    seconds = f"{attempt.seconds:.3f}"
    uid = stored.steps[0].trajectory_uid
    return LINE.format(uid, had, attempt.outcome, value, seconds, shortened(words, WORDS_SHOWN)).rstrip()


def _words(attempt: Attempt) -> str:
    if attempt.score is None:
        return attempt.why
    parts = ", ".join(f"{name} {value:.4g}" for name, value in attempt.score.parts.items())
    return " · ".join(filter(None, (parts, attempt.score.notes)))
