"""Memory for a batch that is used again for the next one: to get fresh pages takes longer than to fill them."""

from sys import getrefcount
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

D = TypeVar("D", bound=np.generic)

WORTH_KEEPING = 2**18, 2**25
"""Bytes: smaller arrays are cheap to allocate, and larger ones are given back to the system."""


class ReusedMemory(Generic[D]):
    """Joins arrays into memory that nobody reads any more. As long as a joined array or a view of it is referred to,
    its memory is left alone."""

    def __init__(self, dtype: type[D]) -> None:
        self._dtype = dtype
        self._array: NDArray[D] = np.empty(0, dtype)
        self._own_references = self._references()

    def join(self, parts: list[NDArray[D]]) -> NDArray[D]:
        """The parts end to end."""
        length = sum(map(len, parts))
        least, most = WORTH_KEEPING
        if not least <= length * self._array.itemsize <= most:
            return np.concatenate(parts) if parts else np.empty(0, self._dtype)
        if len(self._array) < length or not self._is_free():
            self._array = np.empty(length, self._dtype)
        return np.concatenate(parts, out=self._array[:length])

    def _is_free(self) -> bool:
        """A view refers to the array that owns its memory."""
        return self._references() == self._own_references

    def _references(self) -> int:
        """To the array. How many this object itself has is not the same in every Python."""
        return getrefcount(self._array)
