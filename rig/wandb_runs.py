"""Reads back what the real wandb wrote offline."""

from pathlib import Path
from typing import Any

import orjson
from wandb.proto import wandb_internal_pb2

from rig.waiting import wait_until

HEADER = 7
"""Bytes before the first record of a file, and before each piece of a record: checksum, length, kind."""
BLOCK = 32_768
"""A piece does not cross the border of a block."""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the one run below the folder, one entry for each step.

    `finish` of wandb 0.31 does not wait until its process has written the file, so this waits for the last record.
    """
    records: list[Any] = []

    def is_whole() -> bool:
        (run,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        records[:] = [_parsed(data) for data in _records(run.read_bytes())]
        return bool(records) and records[-1].HasField("exit")

    wait_until(is_whole, "wandb has written the run to its end", timeout=30)
    return [
        {item.key or ".".join(item.nested_key): orjson.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.history.item
    ]


def _parsed(data: bytes) -> Any:
    record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
    record.ParseFromString(data)
    return record


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
        if position + HEADER + length > len(content):  # not written to its end yet
            break
        pieces += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(pieces)
            pieces = b""
    return records
