"""Rows of several tables with a mark each, which come and go."""

import random

from stepwell.pool.shard.journal_store import JournalStore

TABLES = {"trajectories": "number", "steps": "number", "slices": "n"}
ADD = "INSERT INTO steps (number, trajectory, info, added) VALUES (?, ?, ?, ?)"
SIZES = (50, 300, 900, 5_000, 60_000)


class MarkedRows:
    def __init__(self, store: JournalStore, seed: int = 1) -> None:
        self.live: set[int] = set()
        self._store = store
        self._random = random.Random(seed)
        self._last = 0

    def change(self, rounds: int) -> None:
        for _ in range(rounds):
            self._add(self._random.randrange(40))
            self.remove(self._random.sample(sorted(self.live), min(len(self.live), self._random.randrange(38))))
            kept = self._random.sample(sorted(self.live), min(len(self.live), 5))
            self._store.commit([("UPDATE steps SET lease = ? WHERE number = ?", [(f"l{n}", n) for n in kept])])

    def remove(self, numbers: list[int]) -> None:
        self.live -= {*numbers}
        gone = [(number,) for number in numbers]
        self._store.commit([(f"DELETE FROM {table} WHERE {key} = ?", gone) for table, key in TABLES.items()])

    def check(self) -> None:
        for table, key in TABLES.items():
            assert {n for (n,) in self._store.rows(f"SELECT {key} FROM {table} ORDER BY {key}")} == self.live
            assert [row and row[0] for row in self._store.table(table, key)] == sorted(self.live)
        infos = dict(self._store.rows("SELECT number, info FROM steps ORDER BY number"))
        assert all(infos[n] == _marked(n, 300) for n in self.live)
        leases = dict(self._store.rows("SELECT number, lease FROM steps ORDER BY number"))
        assert [*self._store.table("steps", "number, lease")] == sorted(leases.items()), "the newer of two rows"

    def _add(self, count: int) -> None:
        new = range(self._last + 1, self._last + count + 1)
        self._last += count
        self.live |= {*new}
        size = self._random.choice
        trajectories = [(n, 1, _marked(n, size(SIZES[:4]))) for n in new]
        steps = [(n, n, _marked(n, 300), _marked(n, size(SIZES))) for n in new]
        slices = [("a", str(n), _marked(n, size(SIZES[:3]))) for n in new]
        self._store.commit(
            [
                ("INSERT INTO trajectories VALUES (?, ?, ?)", trajectories),
                (ADD, steps),
                ("INSERT INTO slices (slice, key, info) VALUES (?, ?, ?)", slices),
            ]
        )


def _marked(number: int, size: int) -> bytes:
    mark = b"MARK%08d|" % number
    return mark * max(1, size // len(mark))


async def never(why: str) -> None:
    raise AssertionError(why)
