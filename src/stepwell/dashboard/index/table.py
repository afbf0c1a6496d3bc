"""Numbers in columns that grow: what is searched often is searched by numpy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST = 1024


class Table:
    """Rows at places. A column is read as an array of all places, used or not."""

    def __init__(self, kinds: Mapping[str, type[np.generic]]) -> None:
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(FIRST, kind) for name, kind in kinds.items()}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self) -> int:
        """A new place."""
        place = self._size
        self._size += 1
        if self._size > len(next(iter(self._columns.values()))):
            self._columns = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self._columns.items()}
        return place

    def put(self, place: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._columns[name][place] = value

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name][: self._size]


class Labels:
    """Texts as small numbers, to stand in a column."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self.names)
            self.names.append(name)
        return code

    def known(self, name: str) -> int:
        """Its number, or one that no row has."""
        return self._codes.get(name, -1)
