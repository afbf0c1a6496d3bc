"""One update in numbers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from stepwell.trainers.learner import Learned
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.rows import TrainedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(Learned):
    update: int
    version: int
    """Of the weights that the engines have now; stays 0 where this trainer does not sync them."""
    reward: float
    """The mean return of the batch's scored rollouts; NaN if there is none."""
    rollouts: int
    rollouts_trained: int
    """The others were trained before, are unscored, lack log-probabilities, or are of a group that earned the same."""
    rows: int
    tokens: int
    """That were trained."""
    staleness: float
    """How many versions before this batch's the trained tokens were written, on average."""
    fetch_seconds: float
    train_seconds: float
    save_seconds: float
    sync_seconds: float
    logprob_gap: float
    """The largest difference between the engines' log-probabilities and ours after the sync; NaN if none was taken."""


class Clock:
    """How long the parts of an update took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - began


def measure(
    batch: TrainingBatch,
    rows: TrainedRows,
    learned: Learned,
    clock: Clock,
    *,
    update: int,
    before: int,
    version: int,
    gap: float | None,
) -> Metrics:
    """`before` is the version with which the batch met, `version` the one that came of it."""
    return Metrics(
        loss=learned.loss,
        ratio=learned.ratio,
        clipped=learned.clipped,
        kl=learned.kl,
        gradient_norm=learned.gradient_norm,
        learning_rate=learned.learning_rate,
        update=update,
        version=version,
        reward=_mean_reward(batch),
        rollouts=len(rows.uids_T),
        rollouts_trained=len(np.unique(rows.merged.trajectory_of_R[rows.chosen_R])),
        rows=len(rows.chosen_R),
        tokens=rows.tokens,
        staleness=_staleness(rows, before),
        fetch_seconds=clock.seconds["fetch"],
        train_seconds=clock.seconds["train"],
        save_seconds=clock.seconds["save"],
        sync_seconds=clock.seconds["sync"],
        logprob_gap=float("nan") if gap is None else gap,
    )


def _mean_reward(batch: TrainingBatch) -> float:
    rewards_T = batch.rewards_T
    scored = rewards_T[~np.isnan(rewards_T)]
    return float(scored.mean()) if len(scored) else float("nan")


def _staleness(rows: TrainedRows, version: int) -> float:
    """Where someone else syncs the engines, `version` is behind, and the newest token says what is new."""
    versions = rows.merged.versions[rows.trained]
    return float(max(version, versions.max()) - versions.mean()) if len(versions) else 0.0
