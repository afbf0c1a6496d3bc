"""Steps in Parquet files, as the archive of a pool and exports have them. Needs the extra `arrow`.

- A group or a trajectory is read whole, with its steps in order.
- A reader has some rows and the longest group in memory, however large the file is.
- A file has its name only when it is complete.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.common.files import writing_under_temporary_name
from stepwell.common.imports import require
from stepwell.errors import BadRequest
from stepwell.steps.arrow import check_schema, columns_from_arrow, group_sizes, step_groups_from_arrow
from stepwell.steps.columns import unpack
from stepwell.steps.groups import StepGroup
from stepwell.steps.layout import run_lengths
from stepwell.steps.step import Step

if TYPE_CHECKING:
    import pyarrow

Write: TypeAlias = "Callable[[pyarrow.Table], None]"

ROWS = 256
"""Steps that are read at once."""
BUFFER = 2**20
ROW_GROUP_BYTES = 2**25
"""Bytes that are collected into one row group."""
EXTRA = "arrow"


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    table: "pyarrow.Table"
    """One row for each step."""
    steps: list[Step]


class ParquetReader:
    """A Parquet file, or a folder of them; a path or any fsspec URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs: Any
        self._fs, self._path = require("fsspec", EXTRA).core.url_to_fs(url)
        require("pyarrow.parquet", EXTRA)

    def has_files(self) -> bool:
        return bool(self._found())

    def files(self) -> list[str]:
        """BadRequest if there is none."""
        if not (found := self._found()):
            raise BadRequest(f"there is no Parquet file in {self.url}")
        return found

    def trajectories(self) -> Iterator[StoredTrajectory]:
        """All trajectories, file by file."""
        for file in self.files():
            yield from self.trajectories_of(file)

    def trajectories_of(self, file: str) -> Iterator[StoredTrajectory]:
        for table in read_whole(self._fs, file, _trajectory_sizes):
            steps, start = unpack(columns_from_arrow(table), copy=False), 0
            for size in _trajectory_sizes(table):
                yield StoredTrajectory(table.slice(start, size), steps[start : start + size])
                start += size

    def _found(self) -> list[str]:
        """The files in this folder, without sub-folders: an archive keeps late rewards there."""
        if self._fs.isfile(self._path):
            return [self._path]
        found = self._fs.ls(self._path, detail=False) if self._fs.isdir(self._path) else []
        return sorted(file for file in found if file.endswith(".parquet"))


class ParquetWriter:
    """Writes files into a folder, which may be any fsspec URL. Small tables are collected into row groups."""

    def __init__(self, url: str, row_group_bytes: int = ROW_GROUP_BYTES) -> None:
        self._row_group_bytes = row_group_bytes
        self._fs: Any
        self._fs, self._path = require("fsspec", EXTRA).core.url_to_fs(url)

    @contextmanager
    def writing(self, name: str) -> Iterator[Write]:
        """A new file of that name, from tables with the same columns."""
        pa, parquet = require("pyarrow", EXTRA), require("pyarrow.parquet", EXTRA)
        waiting: list[pyarrow.Table] = []
        held, writer = 0, None

        def write(table: "pyarrow.Table") -> None:
            nonlocal held
            waiting.append(table)
            held += table.nbytes
            if held >= self._row_group_bytes:
                flush()

        def flush() -> None:
            nonlocal held, writer
            if waiting:
                writer = writer or opened.enter_context(parquet.ParquetWriter(output, waiting[0].schema))
                writer.write_table(pa.concat_tables(waiting))
                waiting.clear()
                held = 0

        with (
            writing_under_temporary_name(self._fs, f"{self._path}/{name}") as temporary,
            self._fs.open(temporary, "wb") as output,
            ExitStack() as opened,
        ):
            yield write
            flush()


def read_step_groups(fs: Any, file: str) -> Iterator[StepGroup]:
    """The groups of a file of an fsspec file system."""
    for table in read_whole(fs, file, group_sizes):
        yield from step_groups_from_arrow(table)


def read_whole(fs: Any, file: str, sizes_of: "Callable[[pyarrow.Table], list[int]]") -> Iterator["pyarrow.Table"]:
    """The rows of a file in tables that end where a part ends, by the sizes of the parts of a table.

    BadRequest if the file is no Parquet file.
    """
    pa, parquet = require("pyarrow", EXTRA), require("pyarrow.parquet", EXTRA)
    with fs.open(file, "rb") as source:
        try:
            rest: list[pyarrow.Table] = []
            """The rows of the last part so far. More of them may follow."""
            for rows in parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False).iter_batches(ROWS):
                table = pa.concat_tables([*rest, pa.Table.from_batches([rows])])
                whole = len(table) - sizes_of(table)[-1]
                if whole:
                    yield table.slice(0, whole)
                rest = [table.slice(whole)]
            yield from rest
        except pa.ArrowException as failure:
            raise BadRequest(f"{file} cannot be read as Parquet: {failure}") from None


def _trajectory_sizes(table: "pyarrow.Table") -> list[int]:
    """How many steps each trajectory has."""
    check_schema(table)
    return run_lengths(zip(table["group"].to_pylist(), table["trajectory_uid"].to_pylist(), strict=True))
