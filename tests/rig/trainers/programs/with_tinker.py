"""Trainers of several channels on one Tinker service, in one process. Run in SkyRL's environment.

Each update is one line on stdout; the last line is the answer.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import tinker  # type: ignore[import-not-found]

from stepwell import logs
from stepwell.pool.client import connect
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from stepwell.trainers.tinker.tinker_loop import TinkerTrainer, TinkerUpdate, run_side_by_side
from stepwell.trainers.tinker.tinker_settings import TinkerSettings


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

    trainers = [
        TinkerTrainer(
            pool,
            service,
            AdapterSync(pool, channel, folder / "adapters"),
            folder / channel,
            base_model=asked["model"],
            settings=TinkerSettings(channel=channel, **asked["settings"]),
            reports=[report],
        )
        for channel in asked["channels"]
    ]
    run_side_by_side(trainers, asked["updates"])
    answer = {
        "updates": [asdict(done) for done in updates],
        "policies": {channel: asdict(pool.channel_policy(channel)) for channel in asked["channels"]},
    }
    sys.stdout.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
