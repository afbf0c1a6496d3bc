"""Groups on disk: JSON lines (one group per line), a Parquet table (one row per sequence), and an HTML page.

- Groups are written as they come, in bounded memory. Existing files are never overwritten.
- Only its owner can read a folder that is new.
- The lines and the table each hold all of a group (null counts as absent).
- The table gets its name when it is complete; the lines and the page can be read at any time.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stepwell.common.files import sync_path, temporary_name
from stepwell.common.imports import require
from stepwell.common.tokenizers import Decode
from stepwell.envs.group_files import GroupPage
from stepwell.errors import BadRequest

if TYPE_CHECKING:
    import pyarrow

LINES, TABLE, PAGE = "groups.jsonl", "groups.parquet", "groups.html"

ROW_GROUP_SEQUENCES = 1_024
ROW_GROUP_TOKENS = 2**20
"""A row group is written when it has so many sequences, or so many tokens."""

PER_SEQUENCE = {
    "tokens": "tokens",
    "masks": "masks",
    "scores": "score",
    "inference_logprobs": "inference_logprobs",
    "policy_versions": "policy_version",
    "exactness": "exactness",
}
"""Keys of a group with one value per sequence, and their columns."""
IN_EXTRAS = (
    *("messages", "advantages", "ref_logprobs", "overrides", "images", "distill_token_ids", "distill_logprobs"),
    *("temperatures", "untrainable", "models"),
)
"""Further such keys, as JSON in the column `extras`. Every other key belongs to the group: column `group_extras`."""


class GroupFolder:
    """Writes each group to all three files, which the first group creates. Whoever makes it closes it."""

    def __init__(self, folder: str | Path, title: str, decode: Decode | None = None) -> None:
        self._folder, self._title, self._decode = Path(folder), title, decode
        self._files = ExitStack()
        self._outputs: tuple[TextIO, GroupTable, GroupPage] | None = None
        for name in (LINES, TABLE, PAGE):
            if (self._folder / name).exists():
                raise BadRequest(f"{self._folder} already has a {name}: name another folder, or remove it")

    def write(self, group: Mapping[str, Any]) -> None:
        lines, table, page = self._outputs = self._outputs or self._open()
        lines.write(json.dumps(dict(group), default=_jsonable) + "\n")
        lines.flush()
        table.write(group)
        page.add(group)

    def close(self) -> None:
        self._files.close()

    def _open(self) -> "tuple[TextIO, GroupTable, GroupPage]":
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        table = GroupTable(self._folder / TABLE)
        self._files.callback(table.close)
        lines = self._files.enter_context((self._folder / LINES).open("x", encoding="utf-8"))
        page = self._files.enter_context((self._folder / PAGE).open("x", encoding="utf-8", errors="backslashreplace"))
        html = GroupPage(page, self._title, self._decode)
        self._files.callback(html.close)
        return lines, table, html


class GroupTable:
    """A Parquet file of groups, written in row groups."""

    def __init__(self, path: Path, row_group_tokens: int = ROW_GROUP_TOKENS) -> None:
        pa, parquet = _pyarrow()
        self._path, self._temporary = path, Path(temporary_name(str(path)))
        self._schema = _schema(pa)
        self._row_group_tokens = row_group_tokens
        self._writer = parquet.ParquetWriter(self._temporary, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = self._groups = 0

    def write(self, group: Mapping[str, Any]) -> None:
        rows = rows_of(self._groups, group)
        self._groups += 1
        self._rows += rows
        self._tokens += sum(len(row["tokens"]) for row in rows)
        if len(self._rows) >= ROW_GROUP_SEQUENCES or self._tokens >= self._row_group_tokens:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()
        sync_path(self._temporary)
        self._temporary.rename(self._path)
        sync_path(self._path.parent)

    def _flush(self) -> None:
        if self._rows:
            pa, _ = _pyarrow()
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
            self._rows, self._tokens = [], 0


def rows_of(number: int, group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A group as rows, one per sequence."""
    group_values = {key: value for key, value in group.items() if key not in PER_SEQUENCE and key not in IN_EXTRAS}
    with_extras = [key for key in IN_EXTRAS if group.get(key) is not None]
    rows = [
        {
            "group": number,
            **{column: None if group.get(key) is None else group[key][k] for key, column in PER_SEQUENCE.items()},
            "extras": _json({key: group[key][k] for key in with_extras}),
            "group_extras": None,
        }
        for k in range(len(group["tokens"]))
    ]
    if rows:
        rows[0]["group_extras"] = _json(group_values)
    return rows


def _json(value: dict[str, Any]) -> str | None:
    return json.dumps(value, default=_jsonable) if value else None


def _jsonable(value: Any) -> Any:
    """A JSON value of a numpy array or number."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _schema(pa: Any) -> "pyarrow.Schema":
    return pa.schema(
        {
            "group": pa.int64(),
            "tokens": pa.list_(pa.int32()),
            "masks": pa.list_(pa.int32()),
            "score": pa.float64(),
            "inference_logprobs": pa.list_(pa.float64()),
            "policy_version": pa.int64(),
            "exactness": pa.string(),
            "extras": pa.string(),
            "group_extras": pa.string(),
        }
    )


def _pyarrow() -> tuple[Any, Any]:
    what = "writing Parquet"
    return require("pyarrow", "envs", purpose=what), require("pyarrow.parquet", "envs", purpose=what)
