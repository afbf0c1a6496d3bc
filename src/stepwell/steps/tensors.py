"""Arrays as tensors. torch is imported on first use.

A tensor shares the memory of a writable array. A read-only array is copied: a tensor cannot be read-only, and an update
in place would change what other processes read.
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


class ArrayRecord:
    """A dataclass whose fields are mostly arrays."""

    __slots__ = ()

    def to_torch(self: "DataclassInstance") -> "dict[str, torch.Tensor]":
        """Every array under its name; uids are left out."""
        return to_tensors(arrays_of(self))


def arrays_of(record: "DataclassInstance") -> dict[str, NDArray[Any]]:
    """The arrays of a dataclass by name. Fields of other types, such as uids, are left out."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def to_tensors(arrays: Mapping[str, NDArray[Any]]) -> "dict[str, torch.Tensor]":
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise BadRequest("to_torch needs PyTorch: pip install torch") from missing
    return {name: torch.from_numpy(array if array.flags.writeable else array.copy()) for name, array in arrays.items()}
