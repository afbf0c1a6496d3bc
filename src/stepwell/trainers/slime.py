"""A rollout function for slime, and for miles, which has the same interface: batches come from the pool.

    # my_rollouts.py; slime gets --rollout-function-path my_rollouts.generate_rollout
    generate_rollout = SlimeRollouts(lambda: connect("data_pool"))

slime itself is imported when it calls. It was written for slime's interface as of August 2026 and has not run with
slime.

- slime's reward of a sample is its advantage, which is computed here: slime would count a rollout of several rows
  several times. So slime's own normalization must be off.
- All rows of a rollout have the same rollout_id, by which slime's loss counts them once.
- A batch is acknowledged when slime asks for the next one. slime does not keep it in its checkpoints, so a killed run
  loses what it has taken and not trained.
- Rows are chosen as in the reference trainer (trainers/rows.py), at slime's rollout_temperature.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol, TypeAlias

import numpy as np

from stepwell.errors import BadRequest
from stepwell.pool.client import DataPool
from stepwell.steps.running_statistics import NO_PAST
from stepwell.trainers.checkpoint import TrainedLedger
from stepwell.trainers.learnable import LearningMonitor
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.row_samples import RowSample, row_samples
from stepwell.trainers.rows import TrainedRows, came_to_no_end, choose_rows
from stepwell.trainers.settings import RowSettings, choose_old_logprobs

ESTIMATORS = ("grpo", "gspo", "cispo")
"""The advantage estimators of slime whose advantage is the reward."""
TYPES = ("slime.utils.types", "miles.utils.types")
"""Where the class Sample is."""
SlimeSample: TypeAlias = Any
"""slime's Sample."""


class SlimeArguments(Protocol):
    """What is read of slime's arguments."""

    rollout_batch_size: int
    rollout_temperature: float
    advantage_estimator: str
    rewards_normalization: bool
    normalize_advantages: bool


class SlimeRollouts:
    """`connect` gives the pool; it is called with the first batch, in slime's process. `sample_type` is slime's Sample
    unless it is given."""

    def __init__(
        self,
        connect: Callable[[], DataPool],
        *,
        channel: str = "train",
        timeout: float = 600.0,
        lease: float = 600.0,
        rows: RowSettings | None = None,
        max_unlearnable: int | None = 20,
        sample_type: Callable[..., SlimeSample] | None = None,
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._timeout = timeout
        self._lease = lease
        self._rows = choose_old_logprobs(
            rows or RowSettings(), ("recorded",), "slime's samples cannot leave out a log-probability"
        )
        self._sample_type = sample_type
        self._pool: DataPool | None = None
        self._ledger = TrainedLedger()
        self._monitor = LearningMonitor(max_unlearnable)
        self._statistics = NO_PAST

    def __call__(
        self, args: SlimeArguments, rollout_id: int, data_source: object, evaluation: bool = False
    ) -> list[list[SlimeSample]]:
        """The samples of `rollout_batch_size` groups, group by group."""
        _check_arguments(args, is_evaluation=evaluation)
        sample_type = self._sample_type or _slime_sample()
        self._pool = self._pool or self._connect()
        settings = replace(self._rows, temperature=args.rollout_temperature)
        while True:
            self._ledger.acknowledge(self._pool)
            batch = self._pool.fetch_batch(
                args.rollout_batch_size,
                timeout=self._timeout,
                lease=self._lease,
                channel=self._channel,
                unit=settings.unit,
            )
            rows = choose_rows(batch, self._ledger, settings, self._statistics)
            self._ledger.add(batch.leases, rows.uids)
            self._statistics = rows.statistics
            self._monitor.check(rows)
            if rows.tokens:
                return _sample_groups(batch, rows, sample_type)


def _sample_groups(
    batch: TrainingBatch, rows: TrainedRows, sample_type: Callable[..., SlimeSample]
) -> list[list[SlimeSample]]:
    has_no_end_R = _without_end(batch, rows)
    groups: dict[int, list[SlimeSample]] = {}
    for index, sample in enumerate(row_samples(rows)):
        group = int(rows.merged.group_of_R[sample.row])
        made = sample_type(group_index=group, index=index, **_fields(rows, sample))
        made.status = made.Status.TRUNCATED if has_no_end_R[sample.row] else made.Status.COMPLETED
        groups.setdefault(group, []).append(made)
    return list(groups.values())


def _fields(rows: TrainedRows, sample: RowSample) -> dict[str, Any]:
    """What slime calls the response begins with the first trained token; context within it is masked."""
    merged, first = rows.merged, int(np.flatnonzero(sample.trained)[0])
    start = merged.offsets_R[sample.row]
    versions = merged.versions[start : start + len(sample.tokens)][sample.trained]
    return {
        "rollout_id": int(merged.trajectory_of_R[sample.row]),
        "tokens": sample.tokens.tolist(),
        "response_length": len(sample.tokens) - first,
        "loss_mask": sample.trained[first:].astype(int).tolist(),
        "rollout_log_probs": sample.logprobs[first:].tolist(),
        "reward": sample.advantage,
        "weight_versions": [str(version) for version in np.unique(versions).tolist()],
        "metadata": {"raw_reward": float(merged.rewards_R[sample.row])},
    }


def _without_end(batch: TrainingBatch, rows: TrainedRows) -> dict[int, bool]:
    """Of each row: did its last step not come to its end?"""
    return dict(zip(rows.merged.row_of_S.tolist(), came_to_no_end(batch.columns).tolist(), strict=True))


def _check_arguments(args: SlimeArguments, *, is_evaluation: bool) -> None:
    if is_evaluation:
        raise BadRequest("the pool has no evaluation data: start slime without --eval-interval")
    if args.advantage_estimator not in ESTIMATORS:
        raise BadRequest(
            f"slime's --advantage-estimator must be one of {', '.join(ESTIMATORS)}: they use our advantages"
        )
    if args.rewards_normalization:
        raise BadRequest(
            "advantages are computed from whole rollouts: start slime with --disable-rewards-normalization"
        )
    if args.normalize_advantages:
        raise BadRequest(
            "slime would normalize the advantages of whole rollouts again, over the tokens of its batch: start it "
            "without --normalize-advantages"
        )


def _slime_sample() -> Callable[..., SlimeSample]:
    for module in TYPES:
        try:
            return import_module(module).Sample  # type: ignore[no-any-return]
        except ModuleNotFoundError:
            continue
    raise BadRequest("neither slime nor miles is installed; they call this function in their own environment")
