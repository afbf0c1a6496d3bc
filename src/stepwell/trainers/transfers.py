"""How weights get from a trainer into the engines: a stream of whole tensors, by the names of the checkpoint that the
engine was started with, and folders of files that the engines load.

- Nothing is copied before its turn, so memory holds one tensor, or one chunk, beside the model.
- A sharded parameter (DTensor, as FSDP2 makes them) is gathered when its turn comes. Every rank takes part in that.
- Adapters of PEFT are merged into a copy of their layer, one layer at a time. The trained model is not changed.
- Tied weights are one tensor with two names. They come once: an engine ties them itself.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from stepwell.common.files import rename_folder
from stepwell.common.imports import require
from stepwell.engines.engine import EngineControl
from stepwell.errors import Conflict

if TYPE_CHECKING:
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.distributed.tensor import DTensor

WeightStream: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
Weights: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | WeightStream"
"""A model, tensors by name, or an iterator of names and tensors."""
TensorState: TypeAlias = dict[str, Any]
"""torch's state_dict."""
BASE_LAYER = ".base_layer."
REPLACED = ".original_module."
SAVED = ".modules_to_save."
"""Parts of the names that PEFT gives to the weights below an adapter, and to trained copies of whole modules."""
FOLDERS = ("a", "b")
UNFINISHED = "unfinished"
FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"
MAX_FILE_BYTES = 2**28
"""Bytes of tensors in one file, which are in memory at once."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def is_model(weights: Weights) -> "TypeGuard[torch.nn.Module]":
    import torch

    return isinstance(weights, torch.nn.Module)


def stream_weights(weights: Weights) -> "Iterator[tuple[str, torch.Tensor]]":
    import torch

    if isinstance(weights, torch.nn.Module):
        named: WeightStream = _of_model(weights)
    else:
        named = weights.items() if isinstance(weights, Mapping) else weights
    for name, tensor in named:
        yield name, _gathered(tensor.detach())


def split_stream(weights: WeightStream, nbytes: int) -> "Iterator[dict[str, torch.Tensor]]":
    """Chunks of at most so many bytes, or of one larger tensor. A chunk is emptied when the next one is asked for."""
    chunk: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in weights:
        if chunk and held + tensor.nbytes > nbytes:
            yield chunk
            chunk.clear()
            held = 0
        chunk[name] = tensor
        held += tensor.nbytes
    if chunk:
        yield chunk


def is_follower(weights: Weights) -> bool:
    """Whether this process only helps to gather a sharded model, whose rank 0 talks to the engines."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
        return False
    return is_model(weights) and is_sharded_model(weights)


def is_sharded_model(model: "torch.nn.Module") -> bool:
    return any(_is_sharded(parameter) for parameter in model.parameters())


def _of_model(model: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    model, layers = _adapted_layers(model)
    adapters = {f"{layer}.{name}" for layer, module in layers.items() for name in module.state_dict()}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        local = tensor.to_local() if _is_sharded(tensor) else tensor
        place = (local.data_ptr(), tuple(tensor.shape))
        layer, below, rest = name.partition(BASE_LAYER)
        if place in seen or REPLACED in name or (name in adapters and not below):
            continue
        seen.add(place)
        if layer in layers:
            yield f"{layer}.{rest}", _merged(layers[layer])[rest]
        elif SAVED in name:
            before, _, after = name.partition(SAVED)
            yield f"{before}.{after.partition('.')[2]}", tensor
        else:
            yield name, tensor


def _adapted_layers(model: "torch.nn.Module") -> "tuple[torch.nn.Module, dict[str, BaseTunerLayer]]":
    """The model inside PEFT's wrapper, and its layers that have adapters, by name."""
    if "peft" not in sys.modules:
        return model, {}
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return inner, {name: module for name, module in inner.named_modules() if isinstance(module, BaseTunerLayer)}


def _merged(layer: "BaseTunerLayer") -> "dict[str, torch.Tensor]":
    copied = deepcopy(layer)
    copied.merge()
    return dict(copied.get_base_layer().state_dict())


def _is_sharded(tensor: "torch.Tensor") -> "TypeGuard[DTensor]":
    """A sharded tensor exists only where the module of its class was imported."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _gathered(tensor: "torch.Tensor") -> "torch.Tensor":
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


class CheckpointTransfer:
    """Writes the weights into `folder`, and the engines load them: they must see it under the same path.

    Two subfolders are used in turn, so the weights before the last ones stay whole; a subfolder is whole or absent. The
    other files of the model folder `like` (configuration, tokenizer) are copied beside the weights, so either
    subfolder is a model that can be served and loaded. A file has at most `max_file_bytes`, or one larger tensor: so
    much memory is needed beside the model.
    """

    def __init__(self, folder: Path, *, like: Path | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = folder.absolute()
        self._like = like
        self._max_file_bytes = max_file_bytes
        self._place = self._folder / FOLDERS[0]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """While it is open, no other process syncs through this folder. Conflict if one does."""
        from fcntl import LOCK_EX, LOCK_NB, flock

        self._folder.mkdir(parents=True, exist_ok=True)
        with self._folder.with_name(f"{self._folder.name}.lock").open("a+") as lock:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = f"process {number}" if (number := lock.read()) else "another process"
                text = f"{owner} is syncing weights through {self._folder}: two trainers overwrite each other's weights"
                raise Conflict(f"{text}; give each its own engines and its own folder") from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def prepare(self, weights: WeightStream, engines: Sequence[EngineControl]) -> None:
        """Writes the weights while the engines still serve. The stream is read once."""
        self._place = min((self._folder / name for name in FOLDERS), key=_written_at)
        unfinished = self._folder / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if self._like is not None:
            copy_other_files(self._like, unfinished)
        write_checkpoint(weights, unfinished, self._max_file_bytes)
        shutil.rmtree(self._place, ignore_errors=True)
        rename_folder(unfinished, self._place)

    def update(self, engines: Sequence[EngineControl]) -> None:
        """Puts the written weights into the engines, which are paused."""
        for engine in engines:
            engine.load_checkpoint(self._place)


def copy_other_files(like: Path, folder: Path) -> None:
    """Copies what a model folder has beside its weights: the configuration and the tokenizer."""
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)


def write_checkpoint(weights: WeightStream, folder: Path, max_file_bytes: int) -> None:
    """One file, or several and an index, as Hugging Face's libraries name them."""
    require("safetensors", "train")
    from safetensors.torch import save_file

    file_of: dict[str, str] = {}
    for number, chunk in enumerate(split_stream(weights, max_file_bytes), 1):
        file = f"model-{number:05d}.safetensors"
        file_of |= dict.fromkeys(chunk, file)
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in chunk.items()},
            folder / file,
            metadata={"format": "pt"},
        )
    if len(set(file_of.values())) == 1:
        (folder / file).rename(folder / FILE)
    else:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def _written_at(place: Path) -> float:
    return place.stat().st_mtime if place.exists() else 0.0
