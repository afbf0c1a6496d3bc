"""Steps as Arrow tables, one row for each step: Parquet files and data frames are made from them and read back.

- Reading a table gives the same columns and groups back, bit for bit.
- A table names the version of its schema. A table of a newer version is refused. A column that an older table lacks has
  its default.
- pyarrow is imported on first use.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepwell.common.imports import require
from stepwell.errors import BadRequest
from stepwell.steps.columns import Columns, cut, make_columns, pack_values, packed_column, stack
from stepwell.steps.groups import StepGroup, with_sorted_metadata
from stepwell.steps.layout import offsets, parts_of, run_lengths, sums
from stepwell.steps.sent_columns import DTYPES
from stepwell.steps.step import (
    GROUP_COLUMNS,
    READERS,
    REQUIRED,
    SCALAR_COLUMNS,
    SCHEMA,
    STEP_COLUMNS,
    BoolArray,
    Column,
    ColumnKind,
    IntArray,
    VersionSpan,
    ids_array,
)

if TYPE_CHECKING:
    import pyarrow

SCHEMA_KEY = b"stepwell.schema"


def columns_to_arrow(
    columns: Columns, group_sizes_G: IntArray, of_groups: Mapping[str, Any], *, first_group: int = 0
) -> "pyarrow.Table":
    """One row for each step. `of_groups` has values of group columns, one for each group; others have their default.

    Groups are numbered from `first_group` on. Only a table whose channels are given has a column for them, the last.
    """
    pa = _pyarrow()
    group_of_S = parts_of(group_sizes_G)
    numbered = {"group": np.arange(first_group, first_group + len(group_sizes_G)), **of_groups}

    def written(column: Column) -> "pyarrow.Array":
        values_G = numbered.get(column.name, [column.default] * len(group_sizes_G))
        return _write_scalars(column, _repeated(column, values_G, group_of_S))

    *before, channel = GROUP_COLUMNS
    arrays = {column.name: written(column) for column in before} | _write_steps(columns)
    if channel.name in of_groups:
        arrays[channel.name] = written(channel)
    return pa.table(arrays, metadata={SCHEMA_KEY: str(SCHEMA).encode()})


def columns_from_arrow(table: "pyarrow.Table") -> Columns:
    """The steps of a table, which may be a slice, or read from Parquet in several chunks."""
    check_schema(table)
    prompts, prompt_lengths = _lists(table["prompt_ids"], np.int32)
    responses, response_lengths = _lists(table["response_ids"], np.int32)
    in_response = _in_response(prompt_lengths, response_lengths)
    tokens = np.empty(len(in_response), np.int32)
    tokens[in_response], tokens[~in_response] = responses, prompts
    values: dict[str, Any] = {
        "tokens": tokens,
        "logprobs": _optional(table["response_logprobs"], response_lengths, np.float32(np.nan)),
        "mask": _optional(table["response_mask"], response_lengths, np.True_),
        "prompt_lengths_S": prompt_lengths,
        "response_lengths_S": response_lengths,
    }
    for column in SCALAR_COLUMNS:
        values[column.packed] = _read_scalars(column, table)
    return make_columns(len(table), values)


def group_sizes(table: "pyarrow.Table") -> list[int]:
    """How many steps each group has. A group ends where its number or its prompt_uid changes."""
    if missing := {"group", "prompt_uid"} - set(table.column_names):
        raise BadRequest(f"a file without a column {min(missing)!r} has no steps; only --shape steps can be read back")
    return run_lengths(zip(table["group"].to_pylist(), table["prompt_uid"].to_pylist(), strict=True))


def group_columns(table: "pyarrow.Table", sizes: Sequence[int]) -> dict[str, Any]:
    """The group columns, one value for each group."""
    firsts = offsets(ids_array(sizes))[:-1]
    columns = {column.name: _read_scalars(column, table) for column in GROUP_COLUMNS}
    return {
        name: values[firsts] if isinstance(values, np.ndarray) else [values[first] for first in firsts.tolist()]
        for name, values in columns.items()
    }


def step_groups_to_arrow(groups: Sequence[StepGroup], first_group: int) -> "pyarrow.Table":
    """One row for each step; groups are numbered from `first_group` on."""
    sizes = [len(group.columns) for group in groups]
    columns = with_sorted_metadata(stack([group.columns for group in groups]))
    named = {"source": [group.source for group in groups], "channel": [group.channel for group in groups]}
    return columns_to_arrow(columns, ids_array(sizes), named, first_group=first_group)


def step_groups_from_arrow(table: "pyarrow.Table") -> Iterator[StepGroup]:
    """The groups of a table in which all groups are whole."""
    columns, sizes = columns_from_arrow(table), group_sizes(table)
    of_groups = group_columns(table, sizes)
    for piece, source, channel in zip(cut(columns, sizes), of_groups["source"], of_groups["channel"], strict=True):
        yield StepGroup(piece, source, channel)


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_steps(columns: Columns) -> "dict[str, pyarrow.Array]":
    responses = columns.response_lengths_S
    in_response = _in_response(columns.prompt_lengths_S, responses)
    arrays = {
        "prompt_ids": list_array(columns.tokens[~in_response], columns.prompt_lengths_S),
        "response_ids": list_array(columns.tokens[in_response], responses),
        "response_logprobs": list_array(columns.logprobs, responses, present_S=columns.has_logprobs_S),
        "response_mask": list_array(columns.mask, responses, present_S=sums(columns.mask, responses) < responses),
    }
    return {
        column.name: arrays[column.name]
        if column.name in arrays
        else _write_scalars(column, packed_column(columns, column))
        for column in STEP_COLUMNS
    }


def _write_scalars(column: Column, values: Any) -> "pyarrow.Array":
    pa = _pyarrow()
    if column.kind is ColumnKind.SPANS:
        return _spans_array(values)
    if column.kind is ColumnKind.OBJECT:
        return pa.array([json.dumps(dict(value)) for value in values], pa.string())
    if column.kind in DTYPES:
        return pa.array(values, mask=np.isnan(values)) if column.default is None else pa.array(values)
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _repeated(column: Column, values_G: Any, group_of_S: NDArray[np.int64]) -> Any:
    """The values of groups, one for each of their steps."""
    if column.kind in DTYPES:
        return np.asarray(values_G, DTYPES[column.kind])[group_of_S]
    return [values_G[group] for group in group_of_S.tolist()]


def list_array(
    flat: NDArray[Any], lengths_S: NDArray[np.signedinteger], present_S: BoolArray | None = None
) -> "pyarrow.ListArray":
    """One list for each step, null where it is not present. Made from the flat array, never from Python lists."""
    pa = _pyarrow()
    if present_S is None:
        return pa.ListArray.from_arrays(pa.array(offsets(lengths_S), pa.int32()), pa.array(flat))
    kept = pa.array(flat[np.repeat(present_S, lengths_S)])
    ends = pa.array(offsets(np.where(present_S, lengths_S, 0)), pa.int32())
    return pa.ListArray.from_arrays(ends, kept, mask=pa.array(~present_S))


def _spans_array(spans_S: list[tuple[VersionSpan, ...]]) -> "pyarrow.ListArray":
    pa = _pyarrow()
    flat = np.array(list(chain.from_iterable(spans_S)), np.int64).reshape(-1, 3)
    parts = [pa.array(flat[:, field], pa.int64()) for field in range(3)]
    ends = pa.array(offsets(np.array([len(spans) for spans in spans_S], np.int32)), pa.int32())
    return pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays(parts, VersionSpan._fields))


# -- reading -----------------------------------------------------------------------------------------------------------


def check_schema(table: "pyarrow.Table") -> None:
    found = (table.schema.metadata or {}).get(SCHEMA_KEY)
    if found is None:
        raise BadRequest("the table has no stepwell.schema in its metadata: was it made by Batch.to_arrow?")
    if not found.isdigit() or not 1 <= int(found) <= SCHEMA:
        raise BadRequest(
            f"the table has schema version {found.decode()}, this Stepwell reads up to {SCHEMA}: install a newer one"
        )


def _read_scalars(column: Column, table: "pyarrow.Table") -> Any:
    if column.name not in table.column_names and column.default is not REQUIRED:
        return pack_values(column, [column.default] * len(table))
    if column.kind in DTYPES:
        return _numbers(table[column.name], DTYPES[column.kind])
    values, read = table[column.name].to_pylist(), READERS.get(column.kind)
    return values if read is None else [read(value) for value in values]


def _lists(column: "pyarrow.ChunkedArray", dtype: type[np.generic]) -> tuple[NDArray[Any], IntArray]:
    """A column of lists: their elements one after the other, and their lengths, 0 for null."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return _numbers(pc.list_flatten(column), dtype), _numbers(lengths, np.int32)


def _optional(column: "pyarrow.ChunkedArray", lengths_S: IntArray, absent: np.generic) -> NDArray[Any]:
    """The elements of lists that are null or of these lengths; a null list has `absent` in all its places."""
    given, _ = _lists(column, type(absent))
    values = np.full(lengths_S.sum(), absent)
    values[np.repeat(column.is_valid().to_numpy(), lengths_S)] = given
    return values


def _numbers(column: "pyarrow.ChunkedArray", dtype: type[np.generic]) -> NDArray[Any]:
    """Null becomes NaN."""
    return np.asarray(column.to_numpy(), dtype)


def _in_response(prompt_lengths_S: IntArray, response_lengths_S: IntArray) -> BoolArray:
    """Whether each token of prompt, response, prompt, response, … is in a response."""
    both = np.stack([prompt_lengths_S, response_lengths_S], axis=1).ravel()
    return np.repeat(np.tile([False, True], len(prompt_lengths_S)), both)


def _pyarrow() -> Any:
    return require("pyarrow", "arrow")
