"""Where an export is written: a file, or a folder that is a dataset.

Invariants:
- Nothing is overwritten. The target has its name only once it is complete.
- A dataset has the files `data/train-00000.parquet` and so on, of about MAX_FILE_BYTES each.
  `datasets.load_dataset(FOLDER)` and `polars.scan_parquet` read it as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import PurePath
from typing import Any

from stepwell.common.files import writing_under_temporary_name
from stepwell.common.imports import require
from stepwell.errors import BadRequest
from stepwell.exports.export_files import DATA
from stepwell.exports.shapes import ExportShape
from stepwell.steps.arrow import EXTRA
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import line_of

MAX_FILE_BYTES = 2**28
"""Bytes after which a dataset gets another file."""
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", "": "dataset"}
"""The formats by the suffix of a path."""


def format_of(path: str) -> str:
    """The file format that a path's suffix names."""
    suffix = PurePath(path).suffix
    if suffix not in FORMATS:
        raise BadRequest(f"the suffix {suffix!r} names no format; use .parquet or .jsonl, or give --format")
    return FORMATS[suffix]


@contextmanager
def open_target(
    url: str, format_: str, shape: ExportShape, max_file_bytes: int = MAX_FILE_BYTES
) -> "Iterator[JsonLinesTarget | ParquetTarget]":
    """A target that becomes a file or a dataset at `url` at the end of the block. A failed block leaves nothing."""
    fs: Any
    fs, path = require("fsspec", EXTRA).core.url_to_fs(url)
    if fs.exists(path):
        raise BadRequest(f"{url} exists already and is not overwritten; name another, or remove it")
    with writing_under_temporary_name(fs, path) as temporary:
        target = (
            JsonLinesTarget(fs, temporary, shape)
            if format_ == "jsonl"
            else ParquetTarget(fs, temporary, shape, max_file_bytes if format_ == "dataset" else None)
        )
        with closing(target):
            yield target


def _new_file(fs: Any, path: str) -> Any:
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    return fs.open(path, "wb")


class JsonLinesTarget:
    def __init__(self, fs: Any, path: str, shape: ExportShape) -> None:
        self._output = _new_file(fs, path)
        self._shape = shape
        self.nbytes = 0
        self.rows = 0

    def write(self, groups: Sequence[StepGroup]) -> None:
        for record in self._shape.records(groups):
            self.nbytes += self._output.write(line_of(record))
            self.rows += 1

    def close(self) -> None:
        self._output.close()


class ParquetTarget:
    """A page of groups becomes a row group."""

    def __init__(self, fs: Any, path: str, shape: ExportShape, max_file_bytes: int | None) -> None:
        """Makes a folder of several files if `max_file_bytes` is given, else one file."""
        self._parquet = require("pyarrow.parquet", EXTRA)
        self._fs, self._path, self._shape, self._max_file_bytes = fs, path, shape, max_file_bytes
        self._output: Any = None
        self._writer: Any = None
        self._files = self._closed_bytes = 0
        self.rows = 0

    @property
    def nbytes(self) -> int:
        return self._closed_bytes + (0 if self._output is None else self._output.tell())

    def write(self, groups: Sequence[StepGroup]) -> None:
        table = self._shape.table(groups)
        if len(table) == 0:
            return
        if self._writer is None:
            self._open(table.schema)
        self._writer.write_table(table)
        self.rows += len(table)
        if self._max_file_bytes is not None and self._output.tell() >= self._max_file_bytes:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._closed_bytes += self._output.tell()
            self._output.close()
            self._writer = self._output = None

    def _open(self, schema: Any) -> None:
        is_folder = self._max_file_bytes is not None
        file = f"{self._path}/{DATA}/train-{self._files:05d}.parquet" if is_folder else self._path
        self._output = _new_file(self._fs, file)
        self._writer = self._parquet.ParquetWriter(self._output, schema, compression="zstd")
        self._files += 1
