"""Trajectories in Parquet files, as a pool's archive has them: read one after the other, and written again.

What always holds: a trajectory comes whole, and in the order of its steps; what is in memory at once is some rows and
the longest trajectory, however large a file is; a file that is written has its name only once it is whole. Needs the
extra `arrow`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.common.atomic_files import writing_under_temporary_name
from stepwell.errors import BadRequest
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.step import Step

if TYPE_CHECKING:
    import pyarrow

ReadTable: TypeAlias = "Callable[[pyarrow.Table], Columns]"
"""The steps of a table; BadRequest if it is none of Stepwell's."""
Write: TypeAlias = "Callable[[pyarrow.Table], None]"

ROWS = 256
"""Steps read at once."""
BUFFER = 2**20
WRITTEN_AT_ONCE = 2**25
"""Bytes that are gathered before they are written."""


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """One trajectory."""

    table: "pyarrow.Table"
    """A row a step."""
    steps: list[Step]


class Store:
    """A Parquet file, or a folder of them; a path or any fsspec URL."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
            import pyarrow
            import pyarrow.parquet
        except ImportError as missing:
            raise BadRequest(f"Parquet files need {missing.name}: pip install 'stepwell[arrow]'") from None
        self.url = url
        self._pa: Any = pyarrow
        self._fs: Any
        self._fs, self._path = fsspec.core.url_to_fs(url)

    def has_files(self) -> bool:
        return bool(self._found())

    def files(self) -> list[str]:
        """BadRequest if there is none."""
        if not (found := self._found()):
            raise BadRequest(f"there is no Parquet file in {self.url}")
        return found

    def read(self, read_table: ReadTable) -> Iterator[StoredTrajectory]:
        """All trajectories, file by file."""
        for file in self.files():
            yield from self.read_file(file, read_table)

    def read_file(self, file: str, read_table: ReadTable) -> Iterator[StoredTrajectory]:
        with self._fs.open(file, "rb") as source:
            try:
                yield from self._whole_trajectories(self._chunks(source), read_table)
            except self._pa.ArrowException as failure:
                raise BadRequest(f"{file} cannot be read as Parquet: {failure}") from None

    @contextmanager
    def writing(self, name: str) -> Iterator[Write]:
        """A new file of that name, from tables with the same columns."""
        with (
            writing_under_temporary_name(self._fs, f"{self._path}/{name}") as temporary,
            self._fs.open(temporary, "wb") as output,
            _Writer(self._pa, output) as writer,
        ):
            yield writer.write

    def _found(self) -> list[str]:
        """In this folder, not in those within: an archive keeps other things there."""
        if self._fs.isfile(self._path):
            return [self._path]
        found = self._fs.ls(self._path, detail=False) if self._fs.isdir(self._path) else []
        return sorted(file for file in found if file.endswith(".parquet"))

    def _chunks(self, source: Any) -> Iterator["pyarrow.Table"]:
        parquet = self._pa.parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)
        for rows in parquet.iter_batches(batch_size=ROWS):
            yield self._pa.Table.from_batches([rows])

    def _whole_trajectories(
        self, chunks: Iterator["pyarrow.Table"], read_table: ReadTable
    ) -> Iterator[StoredTrajectory]:
        rest: list[pyarrow.Table] = []
        """The rows of the last trajectory so far, of which more may come."""
        for chunk in chunks:
            *whole, last = _divided(self._pa.concat_tables([*rest, chunk]), read_table)
            yield from whole
            rest = [last.table]
        if rest:
            yield from _divided(rest[0], read_table)


class _Writer:
    """Gathers small tables into row groups."""

    def __init__(self, pa: Any, output: Any) -> None:
        self._pa, self._output = pa, output
        self._writer: Any = None
        self._waiting: list[pyarrow.Table] = []
        self._bytes = 0

    def write(self, table: "pyarrow.Table") -> None:
        self._waiting.append(table)
        self._bytes += table.nbytes
        if self._bytes >= WRITTEN_AT_ONCE:
            self._flush()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if not failed:
            self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = self._pa.concat_tables(self._waiting)
        if self._writer is None:
            self._writer = self._pa.parquet.ParquetWriter(self._output, table.schema)
        self._writer.write_table(table)
        self._waiting, self._bytes = [], 0


def _divided(table: "pyarrow.Table", read_table: ReadTable) -> list[StoredTrajectory]:
    steps = unpack(read_table(table), copy=False)
    names = zip(table["group"].to_pylist(), (step.trajectory_uid for step in steps), strict=True)
    trajectories, start = [], 0
    for _, run in groupby(names):
        end = start + len(list(run))
        trajectories.append(StoredTrajectory(table.slice(start, end - start), steps[start:end]))
        start = end
    return trajectories
