"""An engine with a real, tiny model in its own dtype: it loads what it is told to load, and tells checksums of it."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stepwell.trainers.weight_sync import probe_logprobs
from tests.unit.trainers.scripted_engine import ScriptedEngine


class HoldingEngine(ScriptedEngine):
    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._model = model
        self.dtype = dtype
        self.has_checksums = True
        self.misses_updates = False
        self.keeps: frozenset[str] = frozenset()
        """Tensors that it does not load."""

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.dtype) for name, tensor in self._model.state_dict().items()}

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/collective_rpc" and not self.misses_updates:
            self._load(Path(body["kwargs"]["weights_path"]))
        if path == "/v1/completions":
            self.logprobs = probe_logprobs(self._model, body["prompt"])
        if path == "/weight_checker" and self.has_checksums:
            self.calls.append(path)
            return 200, {"checksums": {f"dp0:pp0:pcp0:tp0:{name}": _digest(t) for name, t in self.weights.items()}}
        return super().answer(path, body)

    def _load(self, folder: Path) -> None:
        loaded: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            loaded |= load_file(file)
        kept = {name: tensor for name, tensor in loaded.items() if name not in self.keeps}
        rounded = {name: tensor.to(self.dtype).float() for name, tensor in kept.items()}
        self._model.load_state_dict(rounded, strict=False)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
