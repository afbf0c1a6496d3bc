"""verl's checkpoint engine: brings the actor's weights to the engines of the pool, by WeightSync.

- Weights come from verl one whole tensor at a time (of FSDP2's shards by full_tensor), and leave as they come.
- Every rank takes part in gathering; rank 0 talks to the engines.
- Each sync is proved: by checksums, where an engine tells them, and by the log-probabilities of a probe, which the
  trainer announces before.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from stepwell.errors import BadRequest
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.verl.mode_settings import PoolModeSettings, connected_pool, read_mode_settings
from stepwell.trainers.weight_sync import SyncReport, WeightSync

BACKEND = "stepwell"
ENGINE_KEY = "STEPWELL_ENGINE_KEY"
"""The variable with the engines' API key. verl prints its configuration, so the key is not there."""
TIED_HEAD = "lm_head.weight"


@CheckpointEngineRegistry.register(BACKEND)
class PoolCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """`settings` are those of the trainer mode; `model` is what the engines serve: a folder, or a name on the Hub."""

    def __init__(self, bucket_size: int, is_master: bool = False, *, settings: Mapping[str, Any], model: str) -> None:
        self._is_master = is_master
        self._settings = read_mode_settings(settings)
        self._model = model
        self._sync: WeightSync | None = None
        self._next: tuple[int, Sequence[float]] | None = None

    def announce(self, version: int, logprobs: Sequence[float]) -> None:
        """The version of the weights that are sent next, and the log-probabilities of the probe under them."""
        self._next = version, logprobs

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        if not self._is_master:
            for _ in weights:
                pass
            return {}
        if self._next is None:
            raise BadRequest("weights can be sent by the trainer mode stepwell only: trainer.v1.trainer_mode=stepwell")
        version, logprobs = self._next
        self._sync = self._sync or _weight_sync(self._settings, Path(self._model))
        report = self._sync.sync(self._untied(weights), version, logprobs=logprobs)
        return _numbers(report)

    def _untied(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights without the second name of a tied tensor: an engine ties them itself."""
        is_tied = AutoConfig.from_pretrained(self._model).tie_word_embeddings
        return ((name, tensor) for name, tensor in weights if not (is_tied and name == TIED_HEAD))

    # -- for engines that verl itself starts: there are none ----------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None: ...

    def finalize(self) -> None: ...

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        raise NotImplementedError


def _weight_sync(settings: PoolModeSettings, model: Path) -> WeightSync:
    assert settings.weights is not None
    return WeightSync(
        settings.engines,
        transfer=CheckpointTransfer(Path(settings.weights), like=model if model.is_dir() else None),
        pool=connected_pool(settings),
        tolerance=settings.tolerance,
        engine_key=os.environ.get(ENGINE_KEY),
    )


def _numbers(report: SyncReport) -> dict[str, float]:
    numbers = {
        "version": report.version,
        "sync_seconds": report.seconds,
        "paused_seconds": report.paused_seconds,
        "logprob_gap": report.logprob_gap,
        "proven_tensors": report.proven_tensors,
        "engines_left_out": len(report.left_out),
    }
    return {f"stepwell/{name}": float(value) for name, value in numbers.items() if value is not None}
