"""The reference trainer: AsyncTrainer with a pool, and its Learner with rows that are in memory.

The Learner is all of the trainer that computes: what AsyncTrainer does besides (leasing, reading the columns, merging
steps to rows, advantages, acknowledging) counts as the cost of Stepwell. Both are in one process and take their updates
in turns, so that whatever else the machine does slows down both.
"""

import time
from dataclasses import dataclass, field, replace

from benchmarks.trainers_rig.row import TrainerRow
from benchmarks.trainers_rig.stage import Stage
from benchmarks.trainers_rig.timed_run import Length, Round, TimedRun
from stepwell.trainers.learner import Learner
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer

RATE = 1e-5
TIMEOUT = 600.0
"""Seconds for a batch, on a busy machine: all of them are there."""


def measure(stage: Stage, length: Length) -> list[Round]:
    settings = Settings(updates=length.all_updates, groups=length.groups, learning_rate=RATE, fetch_timeout=TIMEOUT)
    channels = stage.fill("ours", length.rounds)
    return [_round(stage, replace(settings, channel=channel), length) for channel in channels]


def _round(stage: Stage, settings: Settings, length: Length) -> Round:
    trainer = AsyncTrainer(stage.pool, stage.model(), settings=settings)
    learner = Learner(stage.model(), None, settings)
    batches = [choose_rows(stage.recording.batch(length.groups, number), ()) for number in range(length.all_updates)]
    pool, memory = _Updates(), _Updates()
    for update, rows in enumerate(batches):
        began = time.monotonic()
        metrics = trainer.step()
        pool.add(began, metrics.loss, metrics.fetch_seconds)
        began = time.monotonic()
        learned = learner.learn(rows, update)
        memory.add(began, learned.loss, 0.0)
    return Round(pool.measured(length), memory.measured(length))


@dataclass(slots=True)
class _Updates:
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add(self, began: float, loss: float, waited: float) -> None:
        self.seconds.append(time.monotonic() - began)
        self.waited.append(waited)
        self.losses.append(loss)

    def measured(self, length: Length) -> TimedRun:
        return TimedRun(
            samples=length.updates * length.samples,
            seconds=sum(self.seconds[length.unmeasured :]),
            waited=sum(self.waited[length.unmeasured :]),
            losses=self.losses,
        )


OURS = TrainerRow("ours", measure)
