"""Reads back what the real wandb wrote offline."""

from pathlib import Path
from typing import Any

import orjson
from wandb.proto import wandb_internal_pb2

HEADER = 7
"""Bytes before the first record of a file, and before each piece of a record: checksum, length, kind."""
BLOCK = 32_768
"""A piece does not cross the border of a block."""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the one run below the folder, one entry for each step."""
    (run,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    history = []
    for data in _records(run.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.history.item:
            history.append(
                {item.key or ".".join(item.nested_key): orjson.loads(item.value_json) for item in record.history.item}
            )
    return history


def _records(content: bytes) -> list[bytes]:
    """LevelDB's log format, in which wandb writes."""
    records, position, pieces = [], HEADER, b""
    while position + HEADER <= len(content):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < HEADER:
            position += left_in_block
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        pieces += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(pieces)
            pieces = b""
    return records
