"""A trainer with a guard that is killed and started again: `live_trainer RAY_ADDRESS FOLDER`.

It trains single steps while sessions go on. Its checkpoint has every step that it was trained on; as AsyncTrainer does,
it first writes the checkpoint and then acknowledges the batch. It offers a new version every few seconds.
"""

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from stepwell.common.files import replacing_file

from benchmarks.survival.live_users import name_of_call
from stepwell.errors import FetchTimeout, PoolUnavailable
from stepwell.pool.client import DataPool, connect
from stepwell.pool.client.batch import Batch
from stepwell.trainers.feed import TrainedLedger
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.guarded_sync import GuardedSync
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import VersionedPool, WeightSync

STEPS = 8
"""In a batch."""
LEASE = 60.0
FETCH_TIMEOUT = 1.0
OFFER = 2.0
"""Seconds from one version to the next."""
TERMS: dict[str, Any] = {"unit": "steps", "min_exactness": "retokenized", "untrainable": True}
GUARD = GuardSettings(canary_share=0.4, margin=0.3, interval=0.2, engine_timeout=6.0)
"""All rewards are 1, so a canary is promoted after about 12 comparisons: some seconds."""
CHECKPOINT, VERSIONS = "live_checkpoint.json", "versions"


@dataclass(slots=True)
class LiveCheckpoint:
    version: int = 1
    """The last that was offered; the model's weight is the same number."""
    leases: list[tuple[str, str]] = field(default_factory=list)
    trained: list[tuple[str, str]] = field(default_factory=list)
    """The uid and the call of each step, once for each time that it was trained."""


def read_live_checkpoint(folder: Path) -> LiveCheckpoint:
    file = folder / CHECKPOINT
    return LiveCheckpoint(**json.loads(file.read_bytes())) if file.exists() else LiveCheckpoint()


class LiveTrainer:
    def __init__(self, pool: DataPool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._state = read_live_checkpoint(folder)
        self._ledger = TrainedLedger(self._state.leases, [uid for uid, _ in self._state.trained])
        self._guard = GuardedSync(pool, folder / VERSIONS, _weight_sync, settings=GUARD)

    def start(self) -> None:
        self._ledger.acknowledge(self._pool)
        newest = self._pool.stats().policy_version
        self._offer(self._state.version if newest <= self._state.version else newest + 1)

    def run(self) -> None:
        offered_at = time.monotonic()
        while True:
            if (batch := self._fetch()) is not None:
                self._train(batch)
            if time.monotonic() - offered_at > OFFER:
                self._offer(self._state.version + 1)
                offered_at = time.monotonic()

    def _fetch(self) -> Batch | None:
        for count in (STEPS, 1):
            try:
                return self._pool.fetch_batch(count, timeout=FETCH_TIMEOUT, lease=LEASE, **TERMS)
            except (FetchTimeout, PoolUnavailable):
                continue
        return None

    def _train(self, batch: Batch) -> None:
        fresh = [step for step in batch.steps() if step.uid not in self._ledger]
        self._state.trained += [(step.uid, name_of_call(step.prompt_ids.tolist())) for step in fresh]
        self._ledger.add(batch.leases, [step.uid for step in fresh])
        self._save()
        self._ledger.acknowledge(self._pool)

    def _offer(self, version: int) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, version)
        self._state.version = max(version, self._guard.sync(model, version).version)
        self._save()

    def _save(self) -> None:
        self._state.leases = list(self._ledger.leases)
        with replacing_file(self._folder / CHECKPOINT) as file:
            file.write(json.dumps(asdict(self._state)).encode())


def _weight_sync(engines: VersionedPool, folder: Path) -> WeightSync:
    return WeightSync(transfer=CheckpointTransfer(folder), pool=engines, probe=(), background=False)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    address, folder = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = LiveTrainer(connect("data_pool", address=address), Path(folder))
    trainer.start()
    sys.stdout.write("works\n")
    sys.stdout.flush()
    trainer.run()


if __name__ == "__main__":
    main()
