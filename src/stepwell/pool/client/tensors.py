"""Arrays as torch tensors. The only file that knows torch, which is imported when first asked for.

A tensor shares its array's memory where the array may be written. A read-only one, as fetched from Ray's object store,
is copied: a tensor cannot be made read-only, and an update in place would reach what other processes read.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance


def arrays_of(holder: "DataclassInstance") -> dict[str, NDArray[Any]]:
    """A dataclass's arrays by name; what torch has no type for, such as uids, is left out."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def tensors(arrays: Mapping[str, NDArray[Any]]) -> "dict[str, torch.Tensor]":
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise BadRequest("to_torch needs PyTorch: pip install torch") from missing
    return {name: torch.from_numpy(array if array.flags.writeable else array.copy()) for name, array in arrays.items()}
