"""Trains LoRA adapters by a service that speaks the Tinker API, one for each channel of the pool.

python examples/tinker/train.py examples/tinker/run.toml

Each line that it prints is a JSON object: an adapter that the engines have now, and the update that made it.
"""

import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import tinker

from stepwell.pool.client import connect
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from stepwell.trainers.tinker.tinker_loop import TinkerTrainer, TinkerUpdate, run_side_by_side
from stepwell.trainers.tinker.tinker_settings import TinkerSettings

run = tomllib.loads(Path(sys.argv[1]).read_text())
folder = Path(run["folder"])
pool = connect("data_pool")
service = tinker.ServiceClient(base_url=run["service"])  # its key is in TINKER_API_KEY


def report(update: TinkerUpdate) -> None:
    adapter = pool.channel_policy(update.channel).adapter
    print(json.dumps({"adapter": adapter, **asdict(update)}), flush=True)


trainers = [
    TinkerTrainer(
        pool,
        service,
        AdapterSync(pool, channel, folder / "adapters"),
        folder / channel,
        base_model=run["model"],
        settings=TinkerSettings(channel=channel, **run["settings"]),
        reports=[report],
    )
    for channel in run["channels"]
]
for trainer, channel in zip(trainers, run["channels"], strict=True):
    trainer.start()  # from now on, the channel's agents are served by its adapter
    print(json.dumps({"adapter": pool.channel_policy(channel).adapter, "channel": channel}), flush=True)
run_side_by_side(trainers, run["updates"])
