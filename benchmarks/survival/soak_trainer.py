"""A trainer that may be killed at any moment: `python -m benchmarks.survival.soak_trainer ADDRESS FILE`.

It writes down a batch before it acknowledges it, and again afterwards. A batch of which only the first line is there
was perhaps acknowledged: then it does not come again.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from stepwell.errors import FetchTimeout, LeaseExpired, PoolUnavailable
from stepwell.pool.client import DataPool, connect
from stepwell.steps.step import Step

GROUPS = 4
RETRY_PAUSE = 0.5


@dataclass(frozen=True, slots=True)
class TrainedStep:
    uid: str
    trajectory_uid: str
    first_id: int
    """The first token of its prompt."""


@dataclass(slots=True)
class TrainerRecord:
    """What trainers wrote down."""

    trained: list[TrainedStep] = field(default_factory=list)
    """Steps that were acknowledged."""
    perhaps: list[TrainedStep] = field(default_factory=list)
    """Steps of batches whose acknowledgement no trainer lived to see."""
    leases_lost: int = 0


def describe(step: Step) -> TrainedStep:
    """A sequence of an environment has no uid, and is a trajectory of its own."""
    return TrainedStep(step.uid or step.trajectory_uid, step.trajectory_uid, int(step.prompt_ids[0]))


def read_record(file: Path) -> TrainerRecord:
    record, open_batches = TrainerRecord(), dict[str, list[TrainedStep]]()
    for line in _lines(file):
        if "steps" in line:
            open_batches[line["batch"]] = [TrainedStep(*step) for step in line["steps"]]
            continue
        steps = open_batches.pop(line["batch"])
        if line["acknowledged"]:
            record.trained += steps
        else:
            record.leases_lost += 1
    trained = {step.uid for step in record.trained}
    perhaps = {step.uid: step for steps in open_batches.values() for step in steps if step.uid not in trained}
    record.perhaps = list(perhaps.values())
    return record


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue  # a kill in the middle of a line; nothing was acknowledged yet


def train(pool: DataPool, log: TextIO) -> None:
    while True:
        try:
            batch = pool.fetch_batch(GROUPS, timeout=1.0, lease=60.0, min_exactness="retokenized", untrainable=True)
        except FetchTimeout:
            continue
        except PoolUnavailable:
            time.sleep(RETRY_PAUSE)
            continue
        name = batch.leases[0][1]
        steps = [(one.uid, one.trajectory_uid, one.first_id) for one in map(describe, batch.steps())]
        print("\n" + json.dumps({"batch": name, "steps": steps}), file=log, flush=True)
        is_acknowledged = _acknowledge(pool, batch)
        print(json.dumps({"batch": name, "acknowledged": is_acknowledged}), file=log, flush=True)


def _acknowledge(pool: DataPool, batch: Any) -> bool:
    while True:
        try:
            pool.ack(batch)
        except PoolUnavailable:
            time.sleep(RETRY_PAUSE)
        except LeaseExpired:
            return False
        else:
            return True


def main() -> None:
    address, file = sys.argv[1:]
    with Path(file).open("a") as log:
        train(connect(address=address), log)


if __name__ == "__main__":
    main()
