"""A trainer that is killed at any moment and started again: `trainer_process RAY_ADDRESS FOLDER [hold]`.

Its weights are a count of how often it was trained on each step, and they are in its checkpoint. As AsyncTrainer does,
it first writes the checkpoint and then acknowledges the batch. With `hold` it takes one batch and keeps it.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.common.files import replacing_file

from stepwell.errors import FetchTimeout, PoolUnavailable
from stepwell.pool.client import DataPool, connect
from stepwell.trainers.feed import TrainedLedger

GROUPS = 4
"""In a batch."""
LEASE = 60.0
FETCH_TIMEOUT = 2.0
TERMS: dict[str, Any] = {"min_exactness": "retokenized", "untrainable": True}


@dataclass(slots=True)
class CountedSteps:
    """What a checkpoint has."""

    leases: list[tuple[str, str]] = field(default_factory=list)
    trajectories: list[str] = field(default_factory=list)
    trained: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """Trajectory, step and first tokens, once for each time that the step was trained."""


def read_counts(folder: Path) -> CountedSteps:
    file = folder / "checkpoint.json"
    return CountedSteps(**json.loads(file.read_bytes())) if file.exists() else CountedSteps()


def _save(folder: Path, ledger: TrainedLedger, trained: list[tuple[str, str, list[int]]]) -> None:
    with replacing_file(folder / "checkpoint.json") as file:
        found = {"leases": ledger.leases, "trajectories": ledger.trained, "trained": trained}
        file.write(json.dumps(found).encode())


def _train(pool: DataPool, folder: Path) -> None:
    counts = read_counts(folder)
    ledger = TrainedLedger(counts.leases, counts.trajectories)
    ledger.acknowledge(pool)
    while True:
        try:
            batch = pool.fetch_batch(GROUPS, timeout=FETCH_TIMEOUT, lease=LEASE, **TERMS)
        except (FetchTimeout, PoolUnavailable):
            try:
                batch = pool.fetch_batch(1, timeout=FETCH_TIMEOUT, lease=LEASE, **TERMS)
            except (FetchTimeout, PoolUnavailable):
                continue
        fresh = [step for step in batch.steps() if step.trajectory_uid not in ledger]
        counts.trained += [(step.trajectory_uid, step.uid, step.prompt_ids[:2].tolist()) for step in fresh]
        ledger.add(batch.leases, [step.trajectory_uid for step in fresh])
        _save(folder, ledger, counts.trained)
        ledger.acknowledge(pool)


def main() -> None:
    address, folder, *mode = sys.argv[1:]
    pool = connect("data_pool", address=address)
    if mode:
        pool.fetch_batch(GROUPS, timeout=60.0, lease=LEASE, **TERMS)
    sys.stdout.write("works\n")
    sys.stdout.flush()
    if mode:
        time.sleep(3600)
    _train(pool, Path(folder))


if __name__ == "__main__":
    main()
