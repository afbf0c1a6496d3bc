"""Reads what `process` writes: groups.jsonl and groups.parquet."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from stepwell.envs.group_files import PER_SEQUENCE


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The groups of a groups.jsonl."""
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def read_table(path: str | Path) -> Iterator[dict[str, Any]]:
    """The groups of a groups.parquet."""
    with pq.ParquetFile(path) as file:
        rows: list[dict[str, Any]] = []
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                if rows and row["group"] != rows[0]["group"]:
                    yield group_of(rows)
                    rows = []
                rows.append(row)
        if rows:
            yield group_of(rows)


def group_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The group of these rows."""
    group = {key: [row[column] for row in rows] for key, column in PER_SEQUENCE.items()}
    present = {key: values for key, values in group.items() if any(value is not None for value in values)}
    extras = [json.loads(row["extras"] or "{}") for row in rows]
    return {
        **present,
        **{key: [extra[key] for extra in extras] for key in extras[0]},
        **json.loads(rows[0]["group_extras"] or "{}"),
    }
