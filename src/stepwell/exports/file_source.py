"""Groups out of files: a Parquet or JSONL file, or a folder of them, as an export or a pool's archive has it.

What always holds: what is in memory at once is some rows and the longest group, however large a file is; a reward that
came after its trajectory had been archived, and lies beside it, is the one that counts.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepwell.errors import BadRequest
from stepwell.exports.late_rewards import FOLDER, LateRewards
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import groups_of_lines
from stepwell.steps.tables import Tables, group_sizes, parquet_modules, read_groups

if TYPE_CHECKING:
    import pyarrow

ROWS = 256
"""Steps read at once."""
BUFFER = 2**20
ENDINGS = (".parquet", ".jsonl")
DATA = "data"
"""Where a dataset's folder has its files."""


class Files:
    """A path, or any fsspec URL."""

    def __init__(self, url: str, tables: Tables) -> None:
        import fsspec

        self._url, self._tables = url, tables
        self._fs: Any
        self._fs, self._path = fsspec.core.url_to_fs(url)

    def groups(self) -> Iterator[StepGroup]:
        files = self._found()
        if not files:
            raise BadRequest(f"there is no Parquet or JSONL file in {self._url}")
        late = LateRewards(self._tables_in(f"{self._path}/{FOLDER}"))
        for file in files:
            found = self._of_lines(file) if file.endswith(".jsonl") else self._of_parquet(file)
            yield from map(late.applied, found) if late else found

    def _found(self) -> list[str]:
        if self._fs.isfile(self._path):
            return [self._path]
        return [file for folder in (self._path, f"{self._path}/{DATA}") for file in self._listed(folder)]

    def _listed(self, folder: str) -> list[str]:
        """In this folder, not in those within: an archive keeps other things there."""
        found = self._fs.ls(folder, detail=False) if self._fs.isdir(folder) else []
        return sorted(file for file in found if file.endswith(ENDINGS))

    def _of_lines(self, file: str) -> Iterator[StepGroup]:
        with self._fs.open(file, "rb") as lines:
            yield from groups_of_lines(lines, self._tables.schema, file)

    def _of_parquet(self, file: str) -> Iterator[StepGroup]:
        pa, parquet = parquet_modules()
        with self._fs.open(file, "rb") as source:
            try:
                rows = parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False).iter_batches(ROWS)
                for table in _without_parts(pa, (pa.Table.from_batches([found]) for found in rows)):
                    yield from read_groups(self._tables, table)
            except pa.ArrowException as failure:
                raise BadRequest(f"{file} cannot be read as Parquet: {failure}") from None

    def _tables_in(self, folder: str) -> "Iterator[pyarrow.Table]":
        for file in self._listed(folder):
            with self._fs.open(file, "rb") as source:
                yield parquet_modules()[1].read_table(source)


def _without_parts(pa: Any, chunks: "Iterator[pyarrow.Table]") -> "Iterator[pyarrow.Table]":
    """The same rows in tables of whole groups: of a chunk's last group more may come."""
    rest: list[pyarrow.Table] = []
    for chunk in chunks:
        table = pa.concat_tables([*rest, chunk])
        last = group_sizes(table)[-1]
        if last < len(table):
            yield table.slice(0, len(table) - last)
        rest = [table.slice(len(table) - last)]
    yield from rest
