"""Steps as lines of JSON: the columns of Parquet, for tools that read text.

- A line that is read back is the step that was written, bit for bit: log-probabilities have all their digits.
- Metadata, sampling and extras are JSON within a text, as in Parquet: their keys differ from step to step, and readers
  of tables want one schema.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import orjson

from stepwell.errors import BadRequest
from stepwell.steps.columns import Columns, pack, unpack
from stepwell.steps.groups import StepGroup, with_sorted_metadata
from stepwell.steps.step import READERS, SCHEMA, STEP_COLUMNS, Column, ColumnKind, Step

SCHEMA_KEY = "stepwell_schema"
Record: TypeAlias = Mapping[str, Any]
"""A line as it stands in the file."""


def line_of(record: Record) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def step_records(group: StepGroup, number: int) -> Iterator[Record]:
    of_group = {SCHEMA_KEY: SCHEMA, "group": number, "source": group.source, "channel": group.channel}
    for step in unpack(with_sorted_metadata(group.columns), copy=False):
        yield of_group | {column.name: _written(column, getattr(step, column.name)) for column in STEP_COLUMNS}


def step_groups_from_lines(lines: Iterable[bytes], name: str) -> Iterator[StepGroup]:
    """The groups of a file of that name. A group ends where its number or its prompt_uid changes."""
    records = (_record(line, n, name) for n, line in enumerate(lines, 1) if line.strip())
    for _, run in groupby(records, key=lambda numbered: (numbered[1].get("group"), numbered[1].get("prompt_uid"))):
        found = list(run)
        first = found[0][1]
        steps = [_step(record, f"{name}, line {n}") for n, record in found]
        yield StepGroup(_packed(steps, name), str(first.get("source", "")), str(first.get("channel", "")))


def _written(column: Column, value: Any) -> Any:
    write = _WRITERS.get(column.kind)
    return value if write is None or value is None else write(value)


_WRITERS: dict[ColumnKind, Callable[[Any], Any]] = {
    ColumnKind.FLOATS: lambda logprobs: logprobs.astype(np.float64),
    ColumnKind.GRADE: str,
    ColumnKind.SPANS: lambda spans: [span._asdict() for span in spans],
    ColumnKind.OBJECT: lambda value: json.dumps(dict(value)),
}


def _record(line: bytes, number: int, name: str) -> tuple[int, Record]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as failure:
        raise BadRequest(f"{name}, line {number} is no JSON: {failure}") from None
    schema = record.get(SCHEMA_KEY) if isinstance(record, dict) else None
    if not isinstance(schema, int):
        raise BadRequest(f"{name}, line {number} has no {SCHEMA_KEY}: only --shape steps can be read back")
    if schema > SCHEMA:
        raise BadRequest(f"{name} has schema version {schema}, this Stepwell reads up to {SCHEMA}: install a newer one")
    return number, record


def _step(record: Record, where: str) -> Step:
    try:
        return Step(**{column.name: _read(column, record) for column in STEP_COLUMNS})
    except (KeyError, TypeError, ValueError, OverflowError) as failure:
        raise BadRequest(f"{where} is no step: {failure!r}") from None


def _read(column: Column, record: Record) -> Any:
    """KeyError if a line lacks a column that its version of the schema has."""
    if column.name not in record and column.since > record[SCHEMA_KEY]:
        return column.default
    value, read = record[column.name], READERS.get(column.kind)
    return value if read is None or (value is None and column.default is None) else read(value)


def _packed(steps: list[Step], name: str) -> Columns:
    try:
        return pack(steps)
    except (TypeError, ValueError, OverflowError) as failure:
        raise BadRequest(f"{name} has something other than a number where one belongs: {failure}") from None
