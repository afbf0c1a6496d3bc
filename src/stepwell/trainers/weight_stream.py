"""A trainer's weights, one whole tensor at a time, by the names of the checkpoint that the engine was started with.

- Nothing is copied before its turn, so memory holds one tensor, or one chunk, beside the model.
- A sharded parameter (DTensor, as FSDP2 makes them) is gathered when its turn comes. Every rank takes part in that.
- Adapters of PEFT are merged into a copy of their layer, one layer at a time. The trained model is not changed.
- Tied weights are one tensor with two names. They come once: an engine ties them itself.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

if TYPE_CHECKING:
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.distributed.tensor import DTensor

WeightStream: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
Weights: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | WeightStream"
"""A model, tensors by name, or an iterator of names and tensors."""

BASE_LAYER = ".base_layer."
REPLACED = ".original_module."
SAVED = ".modules_to_save."
"""Parts of the names that PEFT gives to the weights below an adapter, and to trained copies of whole modules."""


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
