"""The Parquet files of an archive, and how rows are removed from them.

- A file is written again without the rows, under a temporary name, and replaces the old one. A file without other rows
  is deleted. A kill in between leaves the old file or the new one, and perhaps a temporary one.
- Only the row groups of one file are in memory, one at a time.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import orjson

from stepwell.common.files import SUFFIX, sync_paths, temporary_name
from stepwell.common.imports import require
from stepwell.steps.step import JsonObject

if TYPE_CHECKING:
    import pyarrow

EXTRA = "arrow"
NAMED = re.compile(r"(?P<shard>.+)-\d{12}-[0-9a-f]{8}\.parquet(?P<part>\.part)?")
"""The files that shards write."""
BLOCK = 2**20
MORE_ROOM = 32 * BLOCK
NAMES = ("trajectory_uid", "prompt_uid")
METADATA = "metadata"
TOKENS = ("prompt_ids", "response_ids")

TIMES = ("started_at", "at")
"""When a call began, or a late reward was given."""
OPENED = "opened_at"


class ArchivedRow(NamedTuple):
    """What is known of a row when it is decided whether it is removed."""

    trajectory_uid: str
    prompt_uid: str
    metadata: JsonObject
    tokens: int
    at: float
    """When it was recorded. If the row does not tell: when its file was written; infinite if that is not known."""
    arrived: float | None
    """When the pool opened its group, if the row tells."""


IsRemoved: TypeAlias = Callable[[ArchivedRow], bool]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows of a file that are to be removed."""

    file: str
    is_removed: Sequence[bool]
    """For each row of the file."""
    names: Collection[tuple[str, str]]
    """The trajectories of these rows, each with its prompt_uid."""
    tokens: Mapping[str, tuple[int, int]]
    """By trajectory: its steps and tokens; none in files without tokens."""

    @property
    def rows(self) -> int:
        return sum(self.is_removed)


class ArchiveFiles:
    """The files of one folder of an archive, for one shard or for all."""

    def __init__(self, fs: Any, folder: str, is_own: Callable[[str], bool] | None = None) -> None:
        """`is_own` says of the name of a shard whether its files are meant. Without it, all Parquet files are."""
        self._fs = fs
        self._folder = folder
        self._is_own = is_own
        self._parquet = require("pyarrow.parquet", EXTRA)

    def files(self) -> list[str]:
        return [file for file in self._listed() if file.endswith(".parquet")]

    def tables(self, columns: Sequence[str]) -> "Iterator[pyarrow.Table]":
        for file in self.files():
            with self._fs.open(file, "rb") as source:
                yield self._parquet.read_table(source, columns=list(columns))

    def remove_leftovers(self) -> None:
        """What killed processes have not finished. Call it while nothing is written."""
        for file in self._listed():
            if file.endswith(SUFFIX):
                self._fs.rm(file)

    def find(self, file: str, is_removed: IsRemoved) -> FoundRows | None:
        """None if no row is to be removed. A trajectory is removed whole."""
        with self._fs.open(file, "rb") as source:
            parquet = self._parquet.ParquetFile(source)
            known = parquet.schema_arrow.names
            columns = [*NAMES, *(name for name in (METADATA, *TOKENS, *TIMES, OPENED) if name in known)]
            parts = (parquet.read_row_group(part, columns) for part in range(parquet.num_row_groups))
            written_at = self._written_at(file)
            rows = [row for table in parts for row in _rows(table, written_at)]
        names = {row[:2] for row in rows if is_removed(row)}
        if not names:
            return None
        uids = {uid for uid, _ in names}
        tokens: dict[str, tuple[int, int]] = {}
        for uid, _, _, count, *_ in rows:
            if uid in uids and METADATA in columns:
                steps, total = tokens.get(uid, (0, 0))
                tokens[uid] = steps + 1, total + count
        return FoundRows(file, [row[0] in uids for row in rows], names, tokens)

    def check_room(self, file: str) -> None:
        """OSError if a disk of this machine has no room for a second copy of the file, and some more."""
        if "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)):
            needed = self._fs.size(file) + MORE_ROOM
            if disk_usage(self._folder).free < needed:
                raise OSError(f"the disk of {self._folder} needs {needed / BLOCK:.0f} MiB of free space for {file}")

    def digest(self, file: str) -> str:
        """SHA-256; empty if there is no such file."""
        content = sha256()
        try:
            with self._fs.open(file, "rb") as source:
                while block := source.read(BLOCK):
                    content.update(block)
        except FileNotFoundError:
            return ""
        return content.hexdigest()

    def write_without(self, found: FoundRows) -> bool:
        """Under the temporary name. False if nothing would be left."""
        if all(found.is_removed):
            return False
        pa = require("pyarrow", EXTRA)
        with self._fs.open(found.file, "rb") as source, self._fs.open(temporary_name(found.file), "wb") as output:
            parquet = self._parquet.ParquetFile(source)
            start = 0
            with self._parquet.ParquetWriter(output, parquet.schema_arrow) as writer:
                for part in range(parquet.num_row_groups):
                    table = parquet.read_row_group(part)
                    kept = pa.array([not one for one in found.is_removed[start : start + len(table)]])
                    start += len(table)
                    if (left := table.filter(kept)).num_rows:
                        writer.write_table(left)
        sync_paths(self._fs, temporary_name(found.file))
        return True

    def replace(self, found: FoundRows, is_written: bool) -> None:
        if is_written:
            self._fs.mv(temporary_name(found.file), found.file)
        else:
            self._fs.rm(found.file)
        sync_paths(self._fs, self._folder)  # what was removed does not come back

    def _written_at(self, file: str) -> float:
        try:
            written_at: float = self._fs.modified(file).timestamp()
        except (NotImplementedError, OSError):
            return inf
        return written_at

    def _listed(self) -> list[str]:
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._folder):
            return []
        found = sorted(self._fs.ls(self._folder, detail=False))
        return [file for file in found if self._is_meant(file.rpartition("/")[2])]

    def _is_meant(self, name: str) -> bool:
        if self._is_own is None:
            return name.endswith(".parquet")
        match = NAMED.fullmatch(name)
        return match is not None and self._is_own(match["shard"])


def _rows(table: "pyarrow.Table", written_at: float) -> Iterator[ArchivedRow]:
    uids, prompts = (table[name].to_pylist() for name in NAMES)
    nothing: list[None] = [None] * len(uids)
    metadata = table[METADATA].to_pylist() if METADATA in table.column_names else nothing
    tokens = [0] * len(uids)
    for name in TOKENS:
        if name in table.column_names:
            lengths = require("pyarrow.compute", EXTRA).list_value_length(table[name]).to_pylist()
            tokens = [total + (length or 0) for total, length in zip(tokens, lengths, strict=True)]
    times = next((table[name].to_pylist() for name in TIMES if name in table.column_names), nothing)
    opened = table[OPENED].to_pylist() if OPENED in table.column_names else nothing
    for uid, prompt, text, count, at, arrived in zip(uids, prompts, metadata, tokens, times, opened, strict=True):
        yield ArchivedRow(uid, prompt, _parsed(text), count, at or written_at, arrived)


def _parsed(text: str | None) -> JsonObject:
    with suppress(orjson.JSONDecodeError):
        fields = orjson.loads(text or "{}")
        return fields if isinstance(fields, dict) else {}
    return {}
