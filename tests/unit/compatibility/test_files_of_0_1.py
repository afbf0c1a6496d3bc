"""Files written by Stepwell 0.1 are read: journal, archive, JSON lines and spool (tests/fixtures/0.1)."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.gateway.recording.spool_file import SpoolFile
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.batch import batch_from_arrow
from stepwell.steps.columns import unpack
from stepwell.steps.json_lines import step_groups_from_lines
from stepwell.steps.step import Step
from tests.builders import EasyPool, make_step
from tests.unit.pool.shard.journals import open_pool, opened

FIXTURES = Path(__file__).parents[2] / "fixtures" / "0.1"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())
LIMITS = Limits(group_size=2, history_size=4)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[EasyPool]:
    path = unpacked("journal.sqlite", tmp_path)
    pool, _, report = open_pool(path, LIMITS)
    assert [report.groups, report.steps] == EXPECTED["restored"]
    assert not report.damaged
    yield pool
    opened.pop().close()


def test_groups_of_its_journal_are_handed_out_field_by_field(pool: EasyPool) -> None:
    taken = pool.take(1)
    assert taken is not None
    assert as_json(taken[0]) == EXPECTED["ready"]


def test_a_lease_of_its_journal_can_be_acknowledged(pool: EasyPool) -> None:
    assert pool.leasing.ack(EXPECTED["lease"]) == EXPECTED["ack"] == "done"


def test_history_audit_trail_and_policy_version_of_its_journal_are_there(pool: EasyPool) -> None:
    assert pool.state.policy_version == EXPECTED["policy_version"]
    assert [
        [entry.by, entry.action, entry.trajectory_uid, entry.outcome, entry.before, entry.after, entry.why]
        for entry in pool.curator.audit(9)
    ] == EXPECTED["audit"]
    pool.take(1)
    drawn = pool.take(1, history=1.0)
    assert drawn is not None
    assert {step.prompt_uid for step in drawn[0]} <= {f"trained{n}" for n in range(2, 6)}


def test_an_open_trajectory_of_its_journal_goes_on(pool: EasyPool) -> None:
    again = make_step("open", "open-prompt", uid="open-0", started_at=100.0)
    assert [str(verdict) for verdict in pool.submit([again])] == EXPECTED["submitted_again"] == ["duplicate"]
    assert pool.submit([make_step("open", "open-prompt", uid="open-9", started_at=109.0)]) == ["accepted"]
    pool.register(Registration("open-b", "open-prompt"))
    pool.submit([make_step("open-b", "open-prompt", uid="open-b-0")])
    pool.complete("open", "open-prompt", 1.0)
    pool.complete("open-b", "open-prompt", 0.0)
    taken = pool.take(2)
    assert taken is not None
    assert {step.trajectory_uid for step in taken[1]} == {"open", "open-b"}


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
    assert as_json(step for steps in spool.found.values() for step in steps) == EXPECTED["spool"]
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
