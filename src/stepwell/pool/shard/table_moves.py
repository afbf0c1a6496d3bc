"""Rows move to new tables, a piece at a time, so that no page keeps what deleted rows have left in it.

- A table is renamed to `X_old`, a new `X` is created, the rows move, and the old table is dropped. The shard serves
  between two pieces.
- Meanwhile a row is in one of the two tables, or in both: then that of `X` is the newer one. What is deleted or updated
  is deleted or updated in both, and queries read both.
- A process that opens the journal finds it so, and goes on.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from stepwell.pool.shard.journal_store import Statement

OLD = "_old"
MOVED = {
    "groups": ("seq", "length(info)"),
    "trajectories": ("number", "length(info)"),
    "steps": (
        "number",
        "length(info) + coalesce(length(added), 0) + coalesce(length(logprobs), 0) + coalesce(length(mask), 0)",
    ),
}
"""The tables that can be large: each with its key and the bytes of a row. The others fit into one piece."""
PIECE_BYTES, PIECE_ROWS = 2**20, 512
"""A piece takes some milliseconds. A larger row is a piece of its own."""


def mirrored(statements: Iterable[Statement], moving: Collection[str]) -> Iterator[Statement]:
    """The statements, and those that change the old tables too."""
    for sql, rows in statements:
        table = next((name for name in moving if sql.startswith((f"DELETE FROM {name} ", f"UPDATE {name} "))), None)
        if table is None:
            yield sql, rows
            continue
        kept = list(rows)
        yield sql, kept
        yield sql.replace(table, table + OLD, 1), kept


def of_both(query: str, moving: Collection[str]) -> str:
    """The query, of old rows too."""
    for table in moving:
        key, _ = MOVED[table]
        older = f"SELECT * FROM {table}{OLD} WHERE {key} NOT IN (SELECT {key} FROM {table})"
        query = re.sub(rf"FROM {table}\b", f"FROM (SELECT * FROM {table} UNION ALL {older}) AS {table}", query)
    return query


def moves(table: str, read: Callable[[str], Iterable[tuple[Any, ...]]]) -> Iterator[list[Statement]]:
    """What moves the next rows of an old table. The last ones have moved when it ends."""
    key, nbytes = MOVED[table]
    after = -1
    while found := list(
        read(f"SELECT {key}, {nbytes} FROM {table}{OLD} WHERE {key} > {after} ORDER BY {key} LIMIT {PIECE_ROWS}")
    ):
        size = 0
        for number, row_bytes in found:
            if size and size + row_bytes > PIECE_BYTES:
                break
            after, size = number, size + row_bytes
        moved = f"INSERT INTO {table} SELECT * FROM {table}{OLD} WHERE {key} <= ? ON CONFLICT DO NOTHING"
        yield [(moved, [(after,)]), (f"DELETE FROM {table}{OLD} WHERE {key} <= ?", [(after,)])]
