import io
import re
import sys
from dataclasses import fields
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.common.imports import install_command

from rig.builders import make_step, same_step
from stepwell.errors import BadRequest
from stepwell.pool.client.batch import Batch, batch_from_arrow, make_batch
from stepwell.steps.arrow import columns_from_arrow
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import Step, mask_array
from tests.unit.steps.test_columns import steps


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    drawn = sorted(draw(st.lists(steps(), max_size=6)), key=lambda step: step.prompt_uid)
    sizes = [len(list(group)) for _, group in groupby(drawn, key=lambda step: step.prompt_uid)]
    return make_batch(
        pack(drawn),
        sizes,
        opened_at=draw(st.lists(st.floats(0, 2e9), min_size=len(sizes), max_size=len(sizes))),
        attempts=draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes))),
        from_history=draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))),
        sources=draw(st.lists(st.sampled_from(("", "maths")), min_size=len(sizes), max_size=len(sizes))),
    )


def comparable(value: object) -> object:
    if isinstance(value, dict):
        return {name: comparable(of_name) for name, of_name in value.items()}
    return (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value


def assert_same_columns(a: Columns, b: Columns) -> None:
    for field in fields(Columns):
        assert comparable(getattr(a, field.name)) == comparable(getattr(b, field.name)), field.name


def through_parquet(table: pa.Table, rows: int) -> pa.Table:
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=rows)
    return pq.read_table(file)


def example() -> list[Step]:
    return [
        make_step("a", "p", reward=0.5, finish_reason="stop", metadata={"source": "gsm8k"}),
        make_step("b", "p", response_logprobs=None, response_mask=mask_array([True, False])),
        make_step("c", "q", prompt_ids=[7]),
    ]


@given(batches())
def test_a_batch_survives_arrow_bit_for_bit(batch: Batch) -> None:
    read = batch_from_arrow(batch.to_arrow())
    assert_same_columns(read.columns, batch.columns)
    for name in ("group_sizes_G", "opened_at_G", "attempts_G", "from_history_G", "sources"):
        assert comparable(getattr(read, name)) == comparable(getattr(batch, name)), name


@given(batches(), st.integers(1, 3))
def test_a_batch_survives_parquet_in_several_row_groups(batch: Batch, rows: int) -> None:
    read = batch_from_arrow(through_parquet(batch.to_arrow(), rows))
    assert_same_columns(read.columns, batch.columns)
    assert comparable(read.group_sizes_G) == comparable(batch.group_sizes_G)


def test_what_is_missing_is_null() -> None:
    table = make_batch(pack(example()), [2, 1]).to_arrow()
    assert table["reward"].to_pylist() == [0.5, None, None]
    assert table["response_logprobs"].to_pylist() == [[-0.5, -0.5], None, [-0.5, -0.5]]
    assert table["response_mask"].to_pylist() == [None, [True, False], None]
    assert table["finish_reason"].to_pylist() == ["stop", None, None]


def test_columns_have_the_types_that_other_readers_expect() -> None:
    table = make_batch(pack(example()), [2, 1]).to_arrow()
    assert table["prompt_ids"].to_pylist() == [[1, 2], [1, 2], [7]]
    assert table["group"].to_pylist() == [0, 0, 1]
    assert table["metadata"].to_pylist()[0] == '{"source": "gsm8k"}'
    types = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert types["prompt_ids"] == types["response_ids"] == "list<item: int32>"
    assert types["response_logprobs"] == "list<item: float>"
    assert types["response_mask"] == "list<item: bool>"
    assert types["reward"] == "double"
    assert types["version_spans"] == "list<item: struct<version: int64, start: int64, end: int64>>"


def test_a_slice_of_a_table_can_be_read() -> None:
    given_steps = example()
    table = make_batch(pack(given_steps), [2, 1]).to_arrow()
    read = batch_from_arrow(table.slice(1))
    assert all(same_step(a, b) for a, b in zip(read.steps(), given_steps[1:], strict=True))
    assert read.group_sizes_G.tolist() == [1, 1]


def test_groups_of_one_prompt_in_one_batch_stay_apart() -> None:
    batch = make_batch(pack([make_step("a"), make_step("a"), make_step("b")]), [1, 2])
    assert batch_from_arrow(batch.to_arrow()).group_sizes_G.tolist() == [1, 2]


def test_leases_stay_behind() -> None:
    batch = make_batch(pack([make_step()]), [1], leases=(("shard", "lease"),))
    assert batch_from_arrow(batch.to_arrow()).leases == ()


def test_a_table_of_a_newer_schema_is_refused() -> None:
    table = make_batch(pack([make_step()]), [1]).to_arrow()
    assert table.schema.metadata == {b"stepwell.schema": b"6"}
    newer = table.replace_schema_metadata({b"stepwell.schema": b"7"})
    with pytest.raises(BadRequest, match="schema version 7, this Stepwell reads up to 6"):
        columns_from_arrow(newer)


def test_a_table_from_before_there_were_untrainable_steps_can_be_read() -> None:
    given_steps = example()
    table = make_batch(pack(given_steps), [2, 1]).to_arrow()
    older = table.drop_columns(["untrainable"]).replace_schema_metadata({b"stepwell.schema": b"1"})
    assert all(same_step(a, b) for a, b in zip(batch_from_arrow(older).steps(), given_steps, strict=True))


def test_a_table_from_before_there_were_sources_can_be_read() -> None:
    table = make_batch(pack(example()), [2, 1], sources=["maths", ""]).to_arrow()
    assert table["source"].to_pylist() == ["maths", "maths", ""]
    older = table.drop_columns(["source"]).replace_schema_metadata({b"stepwell.schema": b"2"})
    assert batch_from_arrow(older).sources == ["", ""]


def test_a_table_from_elsewhere_is_refused() -> None:
    with pytest.raises(BadRequest, match="no stepwell.schema"):
        columns_from_arrow(pa.table({"prompt_ids": [[1]]}))


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadRequest, match=re.escape(install_command("arrow"))):
        make_batch(pack([make_step()]), [1]).to_arrow()
