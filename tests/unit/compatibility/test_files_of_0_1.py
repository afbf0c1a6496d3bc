"""Of the files that Stepwell 0.1 wrote (tests/fixtures/0.1), archive, JSON lines and spool are read, and the journal is
refused."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.errors import JournalRefused
from stepwell.gateway.recording.spool_file import SpoolFile
from stepwell.pool.client.batch import batch_from_arrow
from stepwell.steps.columns import unpack
from stepwell.steps.json_lines import step_groups_from_lines
from stepwell.steps.step import Step
from tests.unit.pool.shard.journals import open_pool

FIXTURES = Path(__file__).parents[2] / "fixtures" / "0.1"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())


def test_its_journal_is_refused_untouched(tmp_path: Path) -> None:
    path = unpacked("journal.sqlite", tmp_path)
    before = path.read_bytes()
    with pytest.raises(JournalRefused, match="is of an older release: it has schema version 5, and this"):
        open_pool(path)
    assert path.read_bytes() == before


def test_its_archive_is_read_field_by_field() -> None:
    import pyarrow.parquet

    (file,) = (FIXTURES / "archive").iterdir()
    batch = batch_from_arrow(pyarrow.parquet.read_table(file))
    assert batch.group_sizes_G.tolist() == EXPECTED["archive_sizes"]
    assert as_json(batch.steps()) == EXPECTED["archive"]


def test_its_json_lines_are_read_field_by_field() -> None:
    lines = (FIXTURES / "steps.jsonl").read_bytes().splitlines()
    groups = list(step_groups_from_lines(lines, "steps.jsonl"))
    assert [group.source for group in groups] == ["env-1", "env-1"]
    assert as_json(step for group in groups for step in unpack(group.columns, copy=False)) == EXPECTED["archive"]


def test_its_spool_is_read_field_by_field(tmp_path: Path) -> None:
    spool = SpoolFile(unpacked("spool.sqlite", tmp_path))
    spool.close()
    assert list(spool.found) == [1, 2]
    assert as_json(held.step for steps in spool.found.values() for held in steps if held.step) == EXPECTED["spool"]
    assert [path.name for path in tmp_path.iterdir()] == ["spool.sqlite"], "nothing was set aside as damaged"


def unpacked(name: str, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(gzip.decompress((FIXTURES / f"{name}.gz").read_bytes()))
    return path


def as_json(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """The fields that 0.1 knew."""
    return [{name: plain(getattr(step, name)) for name in EXPECTED["archive"][0]} for step in steps]


def plain(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [list(span) for span in value]
    return dict(value) if hasattr(value, "items") else value
