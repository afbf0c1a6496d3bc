"""Packed steps as bytes, for a file: a JSON header with every list and the layout, then the arrays end to end.

What always holds: `from_bytes(to_bytes(steps))` gives the same steps in the same order.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import orjson

from stepwell.steps.columns import Columns, pack, unpack
from stepwell.steps.step import Exactness, Step, VersionSpan

LENGTH = 4
"""Bytes that say how long the header is."""


def to_bytes(steps: Sequence[Step]) -> bytes:
    columns = pack(steps)
    values = {field.name: getattr(columns, field.name) for field in fields(Columns)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    lists = {name: value for name, value in values.items() if name not in arrays}
    layout = {name: [array.dtype.str, len(array)] for name, array in arrays.items()}
    header = _dump({"lists": lists, "layout": layout})
    return b"".join((len(header).to_bytes(LENGTH), header, *(array.tobytes() for array in arrays.values())))


def from_bytes(packed: bytes) -> list[Step]:
    """ValueError if it was not written by `to_bytes`, or by that of another version."""
    try:
        return unpack(_columns(packed), copy=True)
    except (KeyError, TypeError) as failure:
        raise ValueError(f"no packed steps of this version: {failure!r}") from None


def _columns(packed: bytes) -> Columns:
    start = LENGTH + int.from_bytes(packed[:LENGTH])
    header = json.loads(packed[LENGTH:start])  # not orjson's: it reads integers beyond 64 bits as floats
    values: dict[str, Any] = header["lists"]
    for name, (dtype, length) in header["layout"].items():
        values[name] = np.frombuffer(packed, dtype, length, start)
        start += values[name].nbytes
    values["exactness"] = [Exactness(name) for name in values["exactness"]]
    values["version_spans"] = [tuple(VersionSpan(*span) for span in spans) for spans in values["version_spans"]]
    return Columns(**values)


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=list)  # a named tuple is none of orjson's types
    except TypeError:  # an integer beyond 64 bits, say
        return json.dumps(value).encode()
