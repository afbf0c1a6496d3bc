"""Journals of tests. Those that a test opened are closed after it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.pool.shard.journals import opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.sqlite"


@pytest.fixture(autouse=True)
def _closes() -> Iterator[None]:
    yield
    for journal in opened:
        journal.store.close()
    opened.clear()
