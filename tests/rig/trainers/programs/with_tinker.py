"""Trainers of several channels on one Tinker service, in one process. Run in SkyRL's environment.

Each update is one line on stdout; the last line is the answer.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tinker  # type: ignore[import-not-found]

from stepwell import logs
from stepwell.pool.client import connect
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from stepwell.trainers.tinker.tinker_loop import TinkerTrainer, TinkerUpdate, run_side_by_side
from stepwell.trainers.tinker.tinker_settings import TinkerSettings


class NotedSync(AdapterSync):
    """Notes the names of the adapters that the engines were given."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.published: list[str] = []

    def publish(self, archive: bytes, version: int) -> str:
        self.published.append(super().publish(archive, version))
        return self.published[-1]


def main() -> None:
    asked = json.loads(sys.argv[1])
    logs.setup(json=False)
    folder = Path(asked["folder"])
    pool = connect(asked["pool"], address=asked["address"], namespace=asked["namespace"])
    service = tinker.ServiceClient(base_url=asked["service"], api_key="tml-of-the-tests")
    updates: list[TinkerUpdate] = []

    def report(done: TinkerUpdate) -> None:
        updates.append(done)
        sys.stdout.write(f"update {json.dumps(asdict(done))}\n")
        sys.stdout.flush()

    syncs = {channel: NotedSync(pool, channel, folder / "adapters") for channel in asked["channels"]}
    trainers = [
        TinkerTrainer(
            pool,
            service,
            sync,
            folder / channel,
            base_model=asked["model"],
            settings=TinkerSettings(channel=channel, **asked["settings"]),
            reports=[report],
        )
        for channel, sync in syncs.items()
    ]
    run_side_by_side(trainers, asked["updates"])
    answer = {
        "updates": [asdict(done) for done in updates],
        "published": {channel: sync.published for channel, sync in syncs.items()},
    }
    sys.stdout.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
