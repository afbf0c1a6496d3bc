"""A Tinker service takes the same updates from the pool and from memory, in turns. Runs in SkyRL's environment.

From memory, the tinker client sends datums that were made before, and asks for the pass and for the optimizer's step at
once, as tinker's documentation does. Both runs save their state once, after the last update; TinkerTrainer then
acknowledges. A first run from memory is not measured: the service compiles for every shape that it has not seen.
"""

import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker  # type: ignore[import-not-found]

from benchmarks.trainers_rig.recorded import PlainRow
from benchmarks.trainers_rig.timed_run import Round, TimedRun, tell
from stepwell.pool.client import connect
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from stepwell.trainers.tinker.tinker_loop import TinkerTrainer
from stepwell.trainers.tinker.tinker_settings import TinkerLoss, TinkerSettings

RATE = 1e-4
LOSS: TinkerLoss = "importance_sampling"
NEVER = 1_000_000


class NoEngines(AdapterSync):
    """Adapters go to no engine."""

    def publish(self, archive: bytes, version: int) -> str:
        return ""


class NotedClient:
    """A training client whose passes are remembered, with what they were asked."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.passes: list[tuple[Sequence[Any], Any]] = []

    def forward_backward(self, data: list[Any], *others: Any) -> Any:
        future = self._client.forward_backward(data, *others)
        self.passes.append((data, future))
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def losses(self) -> list[float]:
        return [_loss(data, future.result().loss_fn_outputs) for data, future in self.passes]


class NotedService:
    """Its clients are noted ones, and all begin with the same adapter."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self.client: NotedClient

    def create_lora_training_client(self, base_model: str, rank: int) -> NotedClient:
        self.client = NotedClient(self._service.create_lora_training_client(base_model, rank=rank, seed=0))
        return self.client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


def main() -> None:
    asked = json.loads(sys.argv[1])
    pool = connect(asked["pool"], address=asked["address"], namespace=asked["namespace"])
    service = tinker.ServiceClient(base_url=asked["service"], api_key="tml-of-the-benchmark")
    rows: list[PlainRow] = pickle.loads(Path(asked["rows"]).read_bytes())
    updates, samples = asked["unmeasured"] + asked["updates"], asked["samples"]
    batches = [_datums(rows[first : first + samples]) for first in range(0, updates * samples, samples)]
    from_memory(asked, service, batches)
    tell(
        [
            Round(from_pool(asked, service, pool, name), from_memory(asked, service, batches))
            for name in asked["channels"]
        ]
    )


def from_pool(asked: dict[str, Any], service: Any, pool: Any, channel: str) -> TimedRun:
    noted, folder = NotedService(service), Path(asked["folder"])
    settings = TinkerSettings(
        channel=channel,
        groups=asked["groups"],
        rank=asked["rank"],
        loss=LOSS,
        service_loss="mean",
        learning_rate=RATE,
        max_gradient_norm=0.0,
        sync_every=NEVER,
        checkpoint_every=asked["unmeasured"] + asked["updates"],
        fetch_timeout=60.0,
    )
    sync = NoEngines(pool, channel, folder / "adapters")
    trainer = TinkerTrainer(pool, noted, sync, folder / channel, base_model=asked["model"], settings=settings)
    trainer.start()
    waited: list[float] = []

    def update(number: int) -> None:
        waited.append(trainer.step().seconds["fetch"])

    seconds = _timed(asked, update)
    return _run(asked, seconds, sum(waited[asked["unmeasured"] :]), noted.client)


def from_memory(asked: dict[str, Any], service: Any, batches: Sequence[list[Any]]) -> TimedRun:
    client = NotedService(service).create_lora_training_client(asked["model"], asked["rank"])
    adam = tinker.types.AdamParams(learning_rate=RATE, grad_clip_norm=0.0)

    def update(number: int) -> None:
        passed, stepped = client.forward_backward(batches[number], LOSS), client.optim_step(adam)
        passed.result()
        stepped.result()
        if number == len(batches) - 1:
            client.save_state("last").result()

    return _run(asked, _timed(asked, update), 0.0, client)


def _timed(asked: dict[str, Any], update: Callable[[int], None]) -> float:
    """Seconds of the measured updates."""
    for number in range(asked["unmeasured"]):
        update(number)
    began = time.monotonic()
    for number in range(asked["updates"]):
        update(asked["unmeasured"] + number)
    return time.monotonic() - began


def _run(asked: dict[str, Any], seconds: float, waited: float, client: NotedClient) -> TimedRun:
    return TimedRun(asked["updates"] * asked["samples"], seconds, waited, client.losses())


def _datums(rows: Sequence[PlainRow]) -> list[Any]:
    """An update, the shortest row first. The service takes the mean over each row's targets, then over the rows: an
    advantage is so much larger that the loss becomes the mean over all trained tokens."""
    tokens = sum(int(row.trained.sum()) for row in rows)
    return [
        tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints(row.ids[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": row.ids[1:].astype(np.int64),
                "logprobs": row.logprobs[1:],
                "advantages": (row.trained[1:] * row.advantage * len(rows) * (len(row.ids) - 1) / tokens).astype(
                    np.float32
                ),
            },
        )
        for row in sorted(rows, key=lambda row: len(row.ids))
    ]


def _loss(data: Sequence[Any], outputs: Sequence[Any]) -> float:
    """What the advantages make of the log-probabilities: other data or other weights would change it."""
    return -sum(
        float((_numbers(datum.loss_fn_inputs["advantages"]) * _numbers(output["logprobs"])).sum())
        for datum, output in zip(data, outputs, strict=True)
    )


def _numbers(tensor: Any) -> Any:
    return np.asarray(tensor.to_numpy() if hasattr(tensor, "to_numpy") else tensor.data, np.float64)


if __name__ == "__main__":
    main()
