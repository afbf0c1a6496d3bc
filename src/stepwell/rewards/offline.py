"""Reward functions on stored trajectories, without a pool and without Ray: tried, or used to rescore them.

- A function runs as it does in a worker, with the same limits.
- Attempts come in the order of the data.
- A failed attempt is not a score. After all trajectories are done, one failure makes the whole command fail.
- Rescoring leaves no reward of the old function. A failure leaves no reward, and the metadata says why. New rewards
  are the next revision; every other column stays as it is.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeAlias

from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import Attempt, JudgementOutcome, Score
from stepwell.rewards.function import shortened
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.runner.runner import RewardRunner
from stepwell.rewards.sample import sample_of
from stepwell.steps.arrow import ParquetReader, ParquetWriter, StoredTrajectory
from stepwell.steps.layout import reward_carrier
from stepwell.steps.returns import return_of
from stepwell.steps.step import OF_STEP, OF_TRAJECTORY, Json, JsonObject, Step

if TYPE_CHECKING:
    import pyarrow

Say: TypeAlias = Callable[[str], None]

MOST_WAITING = 64
"""Trajectories that may wait for an older one, in addition to those in progress."""
MOST_BYTES = 2**28
LONGEST_DETAILS = 160
"""Characters in the line of an attempt."""
LINE = "{:<32}  {:>9}  {:<7}  {:>9}  {:>7}  {}"
EXPLANATION = "reward"
"""The key of a trajectory's metadata that explains its reward."""


class AttemptSummary:
    """Counts of many attempts, and the range of their scores."""

    def __init__(self) -> None:
        self._failures: Counter[JudgementOutcome] = Counter()
        self._values: list[float] = []
        self._abstentions = 0

    def add(self, attempt: Attempt) -> None:
        if attempt.score is None:
            self._failures[attempt.outcome] += 1
        elif attempt.score.is_abstention:
            self._abstentions += 1
        else:
            self._values.append(attempt.score.value)

    def close(self) -> str:
        """The summary in one line; RewardFailed with the same text if there were failures."""
        text, values = f"{len(self._values)} scored", self._values
        if values:
            text += f" (mean {sum(values) / len(values):.4g}, from {min(values):.4g} to {max(values):.4g})"
        if self._abstentions:
            text += f"; {self._abstentions} abstained"
        if self._failures:
            failures = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(self._failures.items()))
            raise RewardFailed(f"{text}; {self._failures.total()} without a score ({failures})")
        return text


async def try_function(job: Job, reader: ParquetReader, *, limit: int, say: Say) -> None:
    """Prints a line for each of the first trajectories: the reward that it had, and the function's score."""
    summary = AttemptSummary()
    async with RewardRunner(job) as runner:
        say(LINE.format("trajectory", "had", "outcome", "score", "seconds", "").rstrip())
        async for stored, attempt in attempts(runner, islice(reader.trajectories(), limit)):
            summary.add(attempt)
            say(_line(stored, attempt))
    say(summary.close())


async def rescore(job: Job, reader: ParquetReader, target: str, *, say: Say) -> None:
    """Writes every file of the reader to the target, under the same name, with the function's rewards."""
    writer = ParquetWriter(target)
    if ParquetReader(target).has_files():
        raise BadRequest(f"{target} has Parquet files already; rewards of two functions are not mixed there")
    summary, files = AttemptSummary(), reader.files()
    async with RewardRunner(job) as runner:
        for file in files:
            with writer.writing(PurePath(file).name) as write:
                async for stored, attempt in attempts(runner, reader.trajectories_of(file)):
                    summary.add(attempt)
                    await asyncio.to_thread(write, rescored(stored, attempt, runner.name))
            say(f"wrote {PurePath(file).name}")
    say(summary.close())


async def attempts(
    runner: RewardRunner, trajectories: Iterator[StoredTrajectory]
) -> AsyncIterator[tuple[StoredTrajectory, Attempt]]:
    """One attempt per trajectory, in order; a bounded number is in progress at once."""
    in_progress: deque[tuple[StoredTrajectory, asyncio.Task[Attempt]]] = deque()
    is_done, held_bytes = False, 0
    while in_progress or not is_done:
        while not is_done and len(in_progress) < MOST_WAITING + runner.slots and held_bytes < MOST_BYTES:
            stored = await asyncio.to_thread(next, trajectories, None)
            if stored is None:
                is_done = True
            else:
                held_bytes += stored.table.nbytes
                in_progress.append((stored, asyncio.create_task(runner.run(sample_of(stored.steps)))))
        if in_progress:
            stored, attempt = in_progress.popleft()
            held_bytes -= stored.table.nbytes
            yield stored, await attempt


def rescored(stored: StoredTrajectory, attempt: Attempt, source: str) -> "pyarrow.Table":
    steps = stored.steps
    rewards = step_rewards(steps, attempt.score)
    revision = 1 + max(step.reward_revision for step in steps)
    own = (attempt.score and attempt.score.step_rewards) or [None] * len(steps)
    is_changed = [new is not None or step.reward_revision > 0 for new, step in zip(rewards, steps, strict=True)]
    explanation = _explanation(attempt)
    return _with_columns(
        stored.table,
        reward=rewards,
        trajectory_return=[_return(attempt.score)] * len(steps),
        outcome_reward=[None if attempt.score is None else attempt.score.outcome] * len(steps),
        reward_of=[
            "" if shown is None else OF_TRAJECTORY if of_step is None else OF_STEP
            for shown, of_step in zip(rewards, own, strict=True)
        ],
        reward_source=[source if changed else "" for changed in is_changed],
        reward_revision=[revision if changed else 0 for changed in is_changed],
        metadata=[
            json.dumps(_with_explanation(step.metadata, {**explanation, **(details or {})}))
            for step, details in zip_longest(steps, attempt.score.step_details if attempt.score else ())
        ],
    )


def step_rewards(steps: Sequence[Step], score: Score | None) -> list[float | None]:
    """The rewards of steps as the pool ships them: one step carries the rollout's reward, unless that step has its
    own."""
    if score is None:
        return [None] * len(steps)
    rewards = list(score.step_rewards) or [None] * len(steps)
    carrier = reward_carrier([step.untrainable for step in steps])
    if rewards[carrier] is None:
        rewards[carrier] = score.outcome
    return rewards


def _return(score: Score | None) -> float | None:
    return None if score is None or score.is_abstention else score.value


def _explanation(attempt: Attempt) -> dict[str, Json]:
    if attempt.score is None:
        return {"outcome": attempt.outcome, "why": attempt.why}
    details: dict[str, Json] = {"parts": dict(attempt.score.parts), "notes": attempt.score.notes}
    return {name: value for name, value in details.items() if value}


def _with_explanation(metadata: JsonObject, explanation: dict[str, Json]) -> dict[str, Json]:
    others = {name: value for name, value in metadata.items() if name != EXPLANATION}
    return {**others, EXPLANATION: explanation} if explanation else others


def _with_columns(table: "pyarrow.Table", **columns: Sequence[object]) -> "pyarrow.Table":
    import pyarrow

    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        if place < 0:  # a file of an older version
            table = table.append_column(name, pyarrow.array(values, pyarrow.float64()))
        else:
            field = table.schema.field(place)
            table = table.set_column(place, field, pyarrow.array(values, field.type))
    return table


def _line(stored: StoredTrajectory, attempt: Attempt) -> str:
    before = return_of(stored.steps)
    had = "none" if before is None else f"{before:.4g}"
    value = "" if (total := _return(attempt.score)) is None else f"{total:.4g}"
    details = shortened(" ".join(_details(attempt).split()), LONGEST_DETAILS)
    uid = stored.steps[0].trajectory_uid
    return LINE.format(uid, had, attempt.outcome, value, f"{attempt.seconds:.3f}", details).rstrip()


def _details(attempt: Attempt) -> str:
    if attempt.score is None:
        return attempt.why
    parts = ", ".join(f"{name} {value:.4g}" for name, value in attempt.score.parts.items())
    return " · ".join(filter(None, (parts, attempt.score.notes)))
