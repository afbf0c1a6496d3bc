"""Steps as Arrow tables, the way a pool's archive has them, and one column more: the channel.

What always holds: `read_groups(steps_table(groups))` gives the groups back, bit for bit. The way itself is the pool's,
and handed in.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from stepwell.errors import BadRequest
from stepwell.steps.columns import Columns, cut, stack
from stepwell.steps.groups import StepGroup

if TYPE_CHECKING:
    import pyarrow

CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class Tables:
    """The pool's own way."""

    schema: int
    """The version that a file names."""
    write: "Callable[[Columns, Sequence[int], list[str]], pyarrow.Table]"
    """Of steps, how many each group has, and each group's source."""
    read: "Callable[[pyarrow.Table], Columns]"
    """BadRequest if it is none of Stepwell's, or of a newer one."""


def steps_table(tables: Tables, groups: Sequence[StepGroup], first: int) -> "pyarrow.Table":
    """One row a step; groups are numbered from `first` on."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sizes = [len(group.columns) for group in groups]
    columns = _in_one_order(stack([group.columns for group in groups]))
    table = tables.write(columns, sizes, [group.source for group in groups])
    numbers = pc.add(table["group"], pa.scalar(first, pa.int32()))
    table = table.set_column(table.schema.get_field_index("group"), "group", numbers)
    channels = [group.channel for group, size in zip(groups, sizes, strict=True) for _ in range(size)]
    return table.append_column(CHANNEL, pa.array(channels, pa.string()))


def read_groups(tables: Tables, table: "pyarrow.Table") -> Iterator[StepGroup]:
    """The groups of a table that has no part of one."""
    columns = tables.read(table)
    sizes = group_sizes(table)
    sources, channels = _texts(table, "source"), _texts(table, CHANNEL)
    start = 0
    for piece, size in zip(cut(columns, sizes), sizes, strict=True):
        yield StepGroup(piece, sources[start], channels[start])
        start += size


def group_sizes(table: "pyarrow.Table") -> list[int]:
    """A group ends where its number or its prompt_uid changes."""
    if missing := {"group", "prompt_uid"} - set(table.column_names):
        raise BadRequest(f"a file without a column {min(missing)!r} has no steps; only --shape steps can be read back")
    names = zip(table["group"].to_pylist(), table["prompt_uid"].to_pylist(), strict=True)
    return [len(list(run)) for _, run in groupby(names)]


def parquet_modules() -> tuple[Any, Any]:
    """pyarrow and its Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise BadRequest(f"Parquet files need {missing.name}: pip install 'stepwell[arrow]'") from None
    return pyarrow, pyarrow.parquet


def _in_one_order(columns: Columns) -> Columns:
    """With the keys of metadata sorted: a pool keeps a trajectory's apart from its steps', and their order with it."""
    return replace(columns, metadata=[dict(sorted(found.items())) for found in columns.metadata])


def _texts(table: "pyarrow.Table", name: str) -> list[str]:
    return table[name].to_pylist() if name in table.column_names else [""] * len(table)
