"""The values of columns as they are sent or stored: texts, version spans and arrays end to end, lists as JSON.

What is read comes from another process or a file, which may have anything: ValueError, KeyError or TypeError if it is
not what is written here.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from types import NoneType
from typing import Any

import numpy as np

from stepwell.steps.layout import IndexArray
from stepwell.steps.step import SCALAR_COLUMNS, ColumnKind, IntArray, VersionSpan

DTYPES: dict[ColumnKind, type[np.generic]] = {
    ColumnKind.INT32: np.int32,
    ColumnKind.INT64: np.int64,
    ColumnKind.FLOAT64: np.float64,
    ColumnKind.FLAG: np.bool_,
}
"""The kinds that are packed into arrays. All others are lists."""
LIST_CLASSES: dict[ColumnKind, frozenset[type]] = {
    ColumnKind.TEXT: frozenset((str,)),
    ColumnKind.GRADE: frozenset((str,)),
    ColumnKind.OPTIONAL_TEXT: frozenset((str, NoneType)),
    ColumnKind.OBJECT: frozenset((dict,)),
}
LISTS = {column.packed: LIST_CLASSES[column.kind] for column in SCALAR_COLUMNS if column.kind in LIST_CLASSES}
"""The lists that are sent as JSON, with the classes that their values have there."""
TEXTS = tuple(name for name, classes in LISTS.items() if classes == {str})
END = "\0"
"""The mark between texts that are sent end to end."""
SPAN = np.dtype("<i8")
"""The dtype of the three numbers of a VersionSpan."""
ALIKE = "*"
"""The suffix of the name of a column whose texts are all the same."""
SHORT = sorted(
    [
        *((column.packed, np.dtype(DTYPES[column.kind])) for column in SCALAR_COLUMNS if column.kind in DTYPES),
        *((name, np.dtype(np.int32)) for name in ("prompt_lengths_S", "response_lengths_S", "span_counts_S")),
    ],
    key=lambda named: -named[1].itemsize,  # so that all are aligned
)
"""The arrays with one number for each step."""
LAYOUT = ",".join(f"{name}:{dtype.str}" for name, dtype in SHORT)
LENGTH = 4
"""Bytes at the start of stored values that give the length of the header."""
KINDS = {"i": "iu", "f": "f", "b": "b"}


def joined_texts(texts: Mapping[str, list[str]], count: int) -> dict[str, str]:
    """All end to end; once only, where all of a column are alike. Empty if a text has END in it."""
    names, parts = [], []
    for name, column in texts.items():
        is_alike = count > 1 and column.count(column[0]) == count
        names.append(name + ALIKE if is_alike else name)
        parts.append(column[:1] if is_alike else column)
    joined = END.join(chain.from_iterable(parts))
    is_exact = joined.count(END) == max(0, sum(map(len, parts)) - 1)
    return {"texts": joined, "text_names": ",".join(names)} if is_exact else {}


def read_spans(counts: list[int], spans: Any) -> list[tuple[VersionSpan, ...]]:
    ends = [0, *accumulate(counts)]
    numbers = np.frombuffer(spans, SPAN).tolist()
    if len(numbers) != 3 * ends[-1]:
        raise ValueError("spans")
    made = [*map(partial(tuple.__new__, VersionSpan), zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))]
    if set(counts) == {1}:  # as most engines report them
        return [*zip(made)]
    return [tuple(made[start:end]) for start, end in pairwise(ends)]


def read_texts(joined: Any, names: list[str], count: int) -> dict[str, list[str]]:
    """Reads texts that are parts of one text, so nothing else than texts can be among them."""
    texts, at, columns = joined.split(END) if count else [], 0, {}
    for name in names:
        size = 1 if name.endswith(ALIKE) else count
        columns[name.removesuffix(ALIKE)] = texts[at : at + size] * (count // size if count else 1)
        at += size
    if at != len(texts):
        raise ValueError("texts")
    return {name: column for name, column in columns.items() if name in TEXTS}


def read_short(short: Any, layout: Any, count: int) -> dict[str, Any]:
    if type(short) is not bytes or type(layout) is not str:
        raise TypeError("short")
    arrays, start = {}, 0
    for name, dtype in _short_columns(layout):
        arrays[name] = np.ndarray((count,), dtype, short, start)
        start += count * dtype.itemsize
    if start != len(short):
        raise ValueError("short")
    return arrays


@lru_cache(maxsize=64)
def _short_columns(layout: str) -> list[tuple[str, "np.dtype[Any]"]]:
    """The dtypes of the short columns; those of another release may be others. No column gets a dtype that it does not
    have here."""
    sent_columns = [(name, np.dtype(code)) for name, _, code in (part.partition(":") for part in layout.split(","))]
    known = dict(SHORT)
    if any(dtype.kind not in "iufb" or known.get(name, dtype) != dtype for name, dtype in sent_columns):
        raise TypeError("layout")
    if lacking := {"prompt_lengths_S", "response_lengths_S", "span_counts_S"} - {name for name, _ in sent_columns}:
        raise KeyError(*lacking)
    return sent_columns


def check_arrays(values: Mapping[str, Any], kinds: Sequence[tuple[str, str]], count: int) -> None:
    for name, of_dtype in kinds:
        array = values[name]
        if type(array) is not np.ndarray or array.shape != (count,) or array.dtype.kind not in of_dtype:
            raise TypeError(name)


def exact_json(lists: dict[str, list[Any]]) -> bytes | str | dict[str, list[Any]]:
    """The lists as bytes, if orjson leaves out nothing: it writes NaN as null, and takes no integer beyond 64 bits. The
    lists as they are, if they are no JSON."""
    import orjson

    with suppress(TypeError):
        raw = orjson.dumps(lists, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
        if raw.count(b"null") == sum(map(_nones, lists.values())):
            return raw
    try:
        return json.dumps(lists)
    except TypeError:
        return lists


def _nones(values: list[Any]) -> int:
    """How often None is in the list, or in the objects of which it consists."""
    if not values or type(values[0]) is not dict:
        return values.count(None)
    return [*chain.from_iterable(map(dict.values, values))].count(None)


def read_json(raw: Any) -> dict[str, Any]:
    """Reads what orjson has written; it reads other integers beyond 64 bits as floats."""
    import orjson

    value = raw if type(raw) is dict else orjson.loads(raw) if type(raw) is bytes else json.loads(raw)
    if type(value) is not dict or not {list}.issuperset(map(type, value.values())):
        raise TypeError("JSON")
    return value


def checked_shared(base_S: IntArray, shared_S: IntArray, lengths_S: IndexArray) -> int:
    """The sum of `shared_S`, if every base is an earlier row that has as many tokens, or -1."""
    count = len(lengths_S)
    check_arrays({"base_S": base_S, "shared_S": shared_S}, [("base_S", "iu"), ("shared_S", "iu")], count)
    most_S = np.where(base_S < 0, 0, np.minimum(lengths_S, lengths_S[np.clip(base_S, 0, None)])) if count else shared_S
    if not ((base_S >= -1) & (base_S < np.arange(count)) & (shared_S >= 0) & (shared_S <= most_S)).all():
        raise ValueError("bases")
    return int(shared_S.sum(dtype=np.int64))


# -- in a file ---------------------------------------------------------------------------------------------------------


def stored_values(values: Mapping[str, Any]) -> bytes:
    """A JSON header with all lists and the layout, then the arrays end to end."""
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    lists = {name: value for name, value in values.items() if name not in arrays}
    layout = {name: [array.dtype.str, len(array)] for name, array in arrays.items()}
    header = _dump({"lists": lists, "layout": layout})
    return b"".join((len(header).to_bytes(LENGTH), header, *(array.tobytes() for array in arrays.values())))


def read_stored(packed: bytes) -> dict[str, Any]:
    start = LENGTH + int.from_bytes(packed[:LENGTH])
    header = json.loads(packed[LENGTH:start])  # orjson reads integers beyond 64 bits as floats
    values: dict[str, Any] = header["lists"]
    for name, (dtype, length) in header["layout"].items():
        values[name] = np.frombuffer(packed, dtype, length, start)
        start += values[name].nbytes
    return values


def _dump(value: object) -> bytes:
    import orjson  # a trainer's environment needs numpy alone to read a batch

    try:
        return orjson.dumps(value, default=list)  # orjson does not know named tuples
    except TypeError:  # an integer beyond 64 bits, for example
        return json.dumps(value).encode()
