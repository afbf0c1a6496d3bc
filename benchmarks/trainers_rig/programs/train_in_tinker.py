"""A Tinker service takes the same updates from the pool and from memory, in turns. Runs in SkyRL's environment.

- From memory, the tinker client sends datums that were made before, and asks for the pass and for the optimizer's step
  at once, as tinker's documentation does.
- Both save their state once, after the last update; TinkerTrainer then acknowledges.
- After the last update, both adapters compute the first batch again. Their losses are the same if the weights are, and
  differ from those of the first update if something was learned.
- A first run from memory is not measured: the service compiles for every shape that it has not seen.
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
from benchmarks.trainers_rig.timed_run import LEARNED, Round, TimedRun, tell
from stepwell.pool.client import connect
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from stepwell.trainers.tinker.tinker_loop import TinkerTrainer
from stepwell.trainers.tinker.tinker_settings import TinkerLoss, TinkerSettings

RATE = 1e-3
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
        self._passes: list[tuple[Sequence[Any], Any]] = []

    def forward_backward(self, data: list[Any], *others: Any) -> Any:
        future = self._client.forward_backward(data, *others)
        self._passes.append((data, future))
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def losses(self) -> list[float]:
        return [_loss(data, future.result().loss_fn_outputs) for data, future in self._passes]


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


class FromPool:
    def __init__(self, asked: dict[str, Any], service: Any, pool: Any, channel: str) -> None:
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
        self._trainer = TinkerTrainer(pool, noted, sync, folder / channel, base_model=asked["model"], settings=settings)
        self._trainer.start()
        self.client = noted.client

    def update(self, number: int) -> float:
        """Returns how long it waited for data."""
        return self._trainer.step().seconds["fetch"]


class FromMemory:
    def __init__(self, asked: dict[str, Any], service: Any, batches: Sequence[list[Any]]) -> None:
        self.client = NotedService(service).create_lora_training_client(asked["model"], asked["rank"])
        self._batches = batches

    def update(self, number: int) -> float:
        adam = tinker.types.AdamParams(learning_rate=RATE, grad_clip_norm=0.0)
        passed, stepped = self.client.forward_backward(self._batches[number], LOSS), self.client.optim_step(adam)
        passed.result()
        stepped.result()
        if number == len(self._batches) - 1:
            self.client.save_state("last").result()
        return 0.0


def main() -> None:
    asked = json.loads(sys.argv[1])
    pool = connect(asked["pool"], address=asked["address"], namespace=asked["namespace"])
    service = tinker.ServiceClient(base_url=asked["service"], api_key="tml-of-the-benchmark")
    rows: list[PlainRow] = pickle.loads(Path(asked["rows"]).read_bytes())
    updates, samples = asked["unmeasured"] + asked["updates"], asked["samples"]
    batches = [_datums(rows[first : first + samples]) for first in range(0, updates * samples, samples)]
    unmeasured = FromMemory(asked, service, batches)
    for number in range(updates):
        unmeasured.update(number)
    tell([train(asked, service, pool, channel, batches) for channel in asked["channels"]])


def train(asked: dict[str, Any], service: Any, pool: Any, channel: str, batches: Sequence[list[Any]]) -> Round:
    both: Sequence[FromPool | FromMemory] = (
        FromPool(asked, service, pool, channel),
        FromMemory(asked, service, batches),
    )
    seconds, waited = [0.0, 0.0], [0.0, 0.0]
    for number in range(len(batches)):
        for place, source in enumerate(both):
            took, idle = _timed(source.update, number)
            if number >= asked["unmeasured"]:
                seconds[place] += took
                waited[place] += idle
    for source in both:
        source.client.forward_backward(batches[0], LOSS).result()
    runs = [
        TimedRun(asked["updates"] * asked["samples"], took, idle, source.client.losses())
        for source, took, idle in zip(both, seconds, waited, strict=True)
    ]
    for run in runs:
        assert abs(run.losses[-1] - run.losses[0]) > LEARNED * abs(run.losses[0]), run.losses
    return Round(*runs)


def _timed(update: Callable[[int], float], number: int) -> tuple[float, float]:
    began = time.monotonic()
    waited = update(number)
    return time.monotonic() - began, waited


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
