"""Where an export goes: a file, or a folder that is a dataset, under a passing name until it is whole.

What always holds: nothing that was there is written over, and what has the wanted name is whole. A dataset is
`data/train-00000.parquet` and so on, each file of about so many bytes: what `datasets.load_dataset(FOLDER)` and
`polars.scan_parquet` take as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import PurePath
from typing import Any, Protocol

from stepwell.common.atomic_files import writing_under_temporary_name
from stepwell.errors import BadRequest
from stepwell.exports.file_source import DATA
from stepwell.exports.formats import Shape
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import line_of
from stepwell.steps.tables import parquet_modules

A_FILE = 2**28
"""Bytes after which a dataset gets another file."""
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", "": "dataset"}
"""By the ending of a path."""


class Sink(Protocol):
    @property
    def nbytes(self) -> int:
        """Written so far."""

    @property
    def rows(self) -> int: ...

    def write(self, groups: Sequence[StepGroup]) -> None: ...


def format_of(path: str) -> str:
    """The format that a path's ending names."""
    ending = PurePath(path).suffix
    if ending not in FORMATS:
        raise BadRequest(f"the ending {ending!r} names no format; end in .parquet or .jsonl, or say --format")
    return FORMATS[ending]


@contextmanager
def opened(url: str, kind: str, shape: Shape) -> Iterator[Sink]:
    """A sink that becomes a file or a dataset at `url` at the end of the block; without a trace if that fails."""
    import fsspec

    fs: Any
    fs, path = fsspec.core.url_to_fs(url)
    if fs.exists(path):
        raise BadRequest(f"{url} is there already, and is not written over; name another, or remove it")
    with writing_under_temporary_name(fs, path) as temporary:
        sink = (
            _Lines(fs, temporary, shape)
            if kind == "jsonl"
            else _Parquet(fs, temporary, shape, is_folder=kind == "dataset")
        )
        with closing(sink):
            yield sink


def _new_file(fs: Any, path: str) -> Any:
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    return fs.open(path, "wb")


class _Lines:
    def __init__(self, fs: Any, path: str, shape: Shape) -> None:
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


class _Parquet:
    """A page of groups becomes a row group."""

    def __init__(self, fs: Any, path: str, shape: Shape, *, is_folder: bool) -> None:
        _, self._parquet = parquet_modules()
        self._fs, self._path, self._shape, self._is_folder = fs, path, shape, is_folder
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
        if self._is_folder and self._output.tell() >= A_FILE:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._closed_bytes += self._output.tell()
            self._output.close()
            self._writer = self._output = None

    def _open(self, schema: Any) -> None:
        file = f"{self._path}/{DATA}/train-{self._files:05d}.parquet" if self._is_folder else self._path
        self._output = _new_file(self._fs, file)
        self._writer = self._parquet.ParquetWriter(self._output, schema, compression="zstd")
        self._files += 1
