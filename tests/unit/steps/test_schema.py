"""Every form of a step has every column of the schema. A form that loses one fails here."""

import itertools
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.http import as_json
from stepwell.dashboard.views import step_views
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.batch import batch_from_arrow, make_batch
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import Columns, cut, from_bytes, pack, stack, to_bytes, unpack
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import line_of, step_groups_from_lines, step_records
from stepwell.steps.step import (
    CARRIED,
    GROUP_COLUMNS,
    OF_STEP,
    REQUIRED,
    SCALAR_COLUMNS,
    SCHEMA,
    STEP_COLUMNS,
    Column,
    ColumnKind,
    Exactness,
    Step,
    Storage,
    VersionSpan,
    ids_array,
    logprobs_array,
    mask_array,
)
from stepwell.wire.gateway_api import SubmittedStep
from tests.unit.pool.shard.journals import kill, open_pool, save

EXAMPLES: dict[ColumnKind, Callable[[str], Any]] = {
    ColumnKind.IDS: lambda name: ids_array([7, len(name)]),
    ColumnKind.FLOATS: lambda _: logprobs_array([-0.25, -0.5]),
    ColumnKind.FLAGS: lambda _: mask_array([True, False]),
    ColumnKind.INT32: len,
    ColumnKind.INT64: len,
    ColumnKind.FLOAT64: lambda name: len(name) + 0.5,
    ColumnKind.FLAG: lambda _: True,
    ColumnKind.TEXT: str,
    ColumnKind.OPTIONAL_TEXT: lambda name: f"{name}: why",
    ColumnKind.GRADE: lambda _: Exactness.RETOKENIZED,
    ColumnKind.OBJECT: lambda name: {name: [1, {"deep": None}]},
    ColumnKind.SPANS: lambda _: (VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)),
}
"""A value that is not the default, from the name of a column."""
EXAMPLE = Step(**{column.name: EXAMPLES[column.kind](column.name) for column in STEP_COLUMNS})


def plain(value: object) -> object:
    return (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value


def lost(step: Step, *unlike: str) -> list[str]:
    """The columns that a form has changed or lost, except those that it changes on purpose."""
    names = [column.name for column in STEP_COLUMNS if column.name not in unlike]
    return [name for name in names if plain(getattr(step, name)) != plain(getattr(EXAMPLE, name))]


def through_pool(path: Path) -> list[Step]:
    """The example submitted to a pool with a journal, the pool killed and opened again, and the example fetched."""
    pool, journal, _ = open_pool(path)
    pool.register(Registration(EXAMPLE.trajectory_uid, EXAMPLE.prompt_uid))
    pool.submit([replace(EXAMPLE, quarantine=None)])
    pool.complete(EXAMPLE.trajectory_uid, EXAMPLE.prompt_uid)
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(path)
    taken = pool.lease(1, min_exactness=Exactness.RETOKENIZED, untrainable=True)
    assert taken is not None
    kill(journal)
    return unpack(taken[1].columns, copy=False)


def test_the_table_and_the_step_have_the_same_fields_and_defaults() -> None:
    columns = {column.name: column for column in STEP_COLUMNS}
    assert columns.keys() == {field.name for field in fields(Step)}
    for field in fields(Step):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        assert columns[field.name].default == (REQUIRED if default is MISSING else default), field.name


def test_the_example_has_no_default() -> None:
    assert all(plain(getattr(EXAMPLE, column.name)) != plain(column.default) for column in STEP_COLUMNS)


def test_packed_columns_have_every_column() -> None:
    attributes = {field.name for field in fields(Columns)} | {"tokens"}
    for column in STEP_COLUMNS:
        assert column.packed in (pack([EXAMPLE]).carried if column in CARRIED else attributes), column.name
    assert lost(unpack(pack([EXAMPLE]), copy=True)[0]) == []
    assert lost(unpack(stack(cut(pack([EXAMPLE, EXAMPLE]), [1, 1])), copy=False)[1]) == []


def test_a_stored_step_has_every_column() -> None:
    slots = {field.name for field in fields(StoredStep)}
    renamed = {"response_logprobs": "logprobs", "response_mask": "mask"}
    own = [column for column in STEP_COLUMNS if column.stored is Storage.OWN]
    assert {renamed.get(column.name, column.name) for column in own} <= slots


def test_the_journal_and_a_lease_keep_every_column(tmp_path: Path) -> None:
    (step,) = through_pool(tmp_path / "journal")
    assert lost(step, "quarantine", "trajectory_return", "outcome_reward", "reward_of") == []
    assert (step.trajectory_return, step.outcome_reward, step.reward_of) == (EXAMPLE.reward, None, OF_STEP)


def test_spool_files_keep_every_column() -> None:
    assert lost(from_bytes(to_bytes([EXAMPLE]))[0]) == []


@pytest.mark.parametrize("column", [column for column in SCALAR_COLUMNS if column.since > 1], ids=lambda c: str(c.name))
def test_spool_files_of_before_a_column_are_read(column: Column) -> None:
    packed = to_bytes([EXAMPLE])
    end = 4 + int.from_bytes(packed[:4])
    header, arrays = orjson.loads(packed[4:end]), packed[end:]
    if column.packed in header["layout"]:
        before = itertools.takewhile(lambda named: named[0] != column.packed, header["layout"].items())
        start = sum(np.dtype(dtype).itemsize * length for _, (dtype, length) in before)
        dtype, length = header["layout"].pop(column.packed)
        arrays = arrays[:start] + arrays[start + np.dtype(dtype).itemsize * length :]
    else:
        assert header["lists"].pop(column.packed)
    older = orjson.dumps(header)
    (step,) = from_bytes(len(older).to_bytes(4) + older + arrays)
    assert lost(step) == [column.name]
    assert getattr(step, column.name) == column.default


def test_arrow_tables_keep_every_column() -> None:
    pytest.importorskip("pyarrow")
    table = make_batch(pack([EXAMPLE]), [1]).to_arrow()
    names = [column.name for column in (*GROUP_COLUMNS, *STEP_COLUMNS) if column.name != "channel"]
    assert sorted(table.column_names) == sorted(names)
    assert lost(batch_from_arrow(table).steps()[0]) == []


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_arrow_tables_and_lines_of_before_a_column_are_read(schema: int) -> None:
    pytest.importorskip("pyarrow")
    newer = [column for column in STEP_COLUMNS if column.since > schema]
    table = make_batch(pack([EXAMPLE]), [1]).to_arrow().drop_columns([column.name for column in newer])
    (record,) = step_records(StepGroup(pack([EXAMPLE])), 0)
    older = {name: value for name, value in record.items() if name not in {column.name for column in newer}}
    line = line_of(older | {"stepwell_schema": schema})
    (group,) = step_groups_from_lines([line], "x.jsonl")
    table = table.replace_schema_metadata({b"stepwell.schema": str(schema).encode()})
    for step in (*batch_from_arrow(table).steps(), *unpack(group.columns, copy=False)):
        assert lost(step) == [column.name for column in newer]
        assert all(getattr(step, column.name) == column.default for column in newer)


def test_json_lines_keep_every_column() -> None:
    (record,) = step_records(StepGroup(pack([EXAMPLE]), "games", "train"), 0)
    of_group = {"stepwell_schema", "group", "source", "channel"}
    assert record.keys() == of_group | {column.name for column in STEP_COLUMNS}
    (group,) = step_groups_from_lines([line_of(record)], "x.jsonl")
    assert lost(unpack(group.columns, copy=False)[0]) == []


def test_submitted_steps_have_every_column_that_is_submitted() -> None:
    submitted = [column for column in STEP_COLUMNS if column.submitted]
    taken_and_not_stored = {"multi_modal_data", "routed_experts"}
    assert SubmittedStep.model_fields.keys() == {column.name for column in submitted} | taken_and_not_stored
    body = {column.name: getattr(EXAMPLE, column.name) for column in submitted}
    text = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY, default=list)
    step = SubmittedStep.model_validate_json(text).to_step()
    assert lost(step) == [column.name for column in STEP_COLUMNS if not column.submitted]


def test_the_dashboard_shows_every_column_that_is_shown() -> None:
    (view,) = step_views([EXAMPLE], TokenDecoder(None))
    shown = orjson.loads(as_json(view))
    for column in STEP_COLUMNS:
        assert (column.name in shown) == column.shown, column.name
