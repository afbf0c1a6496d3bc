"""Groups to files and back, bit for bit, and never all in memory."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.exports.export_files import FileSource, open_target

from stepwell.errors import BadRequest
from stepwell.exports.shapes import StepsShape
from stepwell.pool.client.batch import make_batch
from stepwell.pool.shard.archive_files import LateReward, late_rewards_table
from stepwell.steps.arrow import ROWS, step_groups_from_arrow
from stepwell.steps.columns import Columns, pack
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import line_of, step_groups_from_lines, step_records
from tests.unit.exports.stored import stored, turns
from tests.unit.steps.test_columns import steps


def as_bytes(found: Any) -> Any:
    return (found.dtype, found.tobytes()) if isinstance(found, np.ndarray) else found


def as_written(columns: Columns) -> list[object]:
    """For comparing: arrays by their bytes, and metadata as JSON has it, in the order of its keys."""

    def value(name: str) -> object:
        found = getattr(columns, name)
        if isinstance(found, Mapping):
            return {key: as_bytes(column) for key, column in found.items()}
        if isinstance(found, np.ndarray):
            return as_bytes(found)
        return [json.dumps(item, sort_keys=True) for item in found] if name == "metadata" else found

    return [value(field.name) for field in fields(Columns)]


def same(given: Sequence[StepGroup], found: Sequence[StepGroup]) -> bool:
    """Rewards of NaN compare by their bytes."""
    plain = [[(g.source, g.channel, as_written(g.columns)) for g in groups] for groups in (given, found)]
    return plain[0] == plain[1]


@st.composite
def some_groups(draw: st.DrawFn) -> list[StepGroup]:
    drawn = draw(st.lists(steps(), min_size=1, max_size=6))
    finite = [replace(step, reward=None if step.reward in (np.inf, -np.inf) else step.reward) for step in drawn]
    in_order = sorted(finite, key=lambda step: (step.prompt_uid, step.trajectory_uid))
    names = st.sampled_from(("", "maths", "δοκιμή"))
    return [
        StepGroup(pack(list(run)), draw(names), draw(names))
        for _, run in groupby(in_order, key=lambda step: step.prompt_uid)
    ]


@given(some_groups())
def test_groups_survive_a_table_bit_for_bit(groups: list[StepGroup]) -> None:
    assert same(groups, list(step_groups_from_arrow(StepsShape().table(groups))))


@given(some_groups())
def test_groups_survive_lines_bit_for_bit(groups: list[StepGroup]) -> None:
    lines = [line_of(record) for n, group in enumerate(groups) for record in step_records(group, n)]
    assert same(groups, list(step_groups_from_lines(lines, "x.jsonl")))


def test_every_float32_that_is_hard_to_write_comes_back_from_a_line() -> None:
    luck = np.random.default_rng(0)
    bits = luck.integers(0x3000_0000, 0x4200_0000, 20_000, dtype=np.uint32) | np.uint32(0x8000_0000)
    logprobs = bits.view(np.float32)
    group = stored(turns("t", response_ids=[1] * len(bits), response_logprobs=logprobs))
    (found,) = step_groups_from_lines(map(line_of, step_records(group, 0)), "x.jsonl")
    assert found.columns.logprobs.tobytes() == logprobs.tobytes()


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x"])
def test_what_is_written_in_pages_is_read_as_one(tmp_path: Path, name: str) -> None:
    first = [stored(turns("a", 2), turns("b", 1)), stored(turns("c", 1), source="maths", channel="validation")]
    second = [stored(turns("d", 3, "q"))]
    write(tmp_path / name, first, second)
    assert same([*first, *second], read(tmp_path / name))


def test_a_group_comes_whole_however_the_file_is_cut(tmp_path: Path) -> None:
    groups = [stored(turns("long", 2 * ROWS + 3), turns("b")), stored(turns("c", ROWS)), stored(turns("d", 5))]
    pq.write_table(StepsShape().table(groups), tmp_path / "a.parquet", row_group_size=7)
    assert same(groups, read(tmp_path))


def test_a_prompt_that_came_again_is_another_group(tmp_path: Path) -> None:
    groups = [stored(turns("a")), stored(turns("b"))]
    for name in ("x.parquet", "x.jsonl"):
        write(tmp_path / name, groups)
        assert [group.columns.trajectory_uids for group in read(tmp_path / name)] == [["a"], ["b"]]


def test_an_archive_is_read_with_the_rewards_that_came_later(tmp_path: Path) -> None:
    of_a = [*turns("a", 2, reward=0.5, reward_revision=1), *turns("a", 1)]
    of_a = [replace(step, step_index=n) for n, step in enumerate(of_a)]
    of_a[2] = replace(of_a[2], untrainable="side_call: a title")
    steps = [*of_a, *turns("b", 1, reward=0.25, reward_revision=4)]
    pq.write_table(make_batch(pack(steps), [4], sources=["maths"]).to_arrow(), tmp_path / "pool-1.parquet")
    (tmp_path / "_rewards").mkdir()
    rewards = [late("a", None, 9.0, 2), late("a", None, 8.0, 3), late("a", 0, 7.0, 2), late("b", None, 1.0, 3)]
    pq.write_table(late_rewards_table(rewards), tmp_path / "_rewards" / "pool-1.parquet")

    (group,) = read(tmp_path)
    assert (group.source, group.channel) == ("maths", "")
    assert group.columns.rewards_S[[0, 1, 3]].tolist() == [7.0, 8.0, 0.25]
    assert group.columns.reward_revisions_S.tolist() == [2, 3, 0, 4]
    assert group.columns.reward_sources == ["people", "people", "", ""]


def test_reading_takes_the_memory_of_some_rows(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, (4_000, 1_000), dtype=np.int32)
    groups = [stored(turns(f"t{n}", 1, f"p{n}", prompt_ids=ids)) for n, ids in enumerate(tokens)]
    write(tmp_path / "x.parquet", groups)
    del groups
    before, most = pa.total_allocated_bytes(), 0
    for _ in FileSource(str(tmp_path / "x.parquet")).groups():
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < tokens.nbytes / 2


def newer(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({b"stepwell.schema": b"99"})


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("x.parquet", lambda file: pq.write_table(newer(a_table()), file), "schema version 99.*install a newer one"),
        ("x.parquet", lambda file: pq.write_table(pa.table({"prompt": ["a"]}), file), "only --shape steps"),
        ("x.parquet", lambda file: file.write_bytes(b"no Parquet at all"), "cannot be read as Parquet"),
        ("x.jsonl", lambda file: file.write_text('{"stepwell_schema": 99}\n'), "schema version 99.*install a newer"),
        ("x.jsonl", lambda file: file.write_text('{"prompt": "a"}\n'), "line 1 has no stepwell_schema"),
        ("x.jsonl", lambda file: file.write_text("\n{]\n"), "line 2 is no JSON"),
        ("x.jsonl", lambda file: file.write_text('{"stepwell_schema": 3, "uid": "u"}\n'), "line 1 is no step"),
        ("x.txt", lambda file: None, "there is no Parquet or JSONL file"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(
    tmp_path: Path, name: str, make: Callable[[Path], None], words: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(BadRequest, match=words):
        read(tmp_path)


def a_table() -> pa.Table:
    return StepsShape().table([stored(turns("a"))])


def late(uid: str, step_index: int | None, value: float, revision: int) -> LateReward:
    return LateReward(
        trajectory_uid=uid,
        prompt_uid="p",
        step_index=step_index,
        value=value,
        source="people",
        notes="",
        revision=revision,
        at=0.0,
    )


def write(path: Path, *pages: list[StepGroup]) -> None:
    kind = {".parquet": "parquet", ".jsonl": "jsonl"}.get(path.suffix, "dataset")
    with open_target(str(path), kind, StepsShape()) as target:
        for page in pages:
            target.write(page)


def read(path: Path) -> list[StepGroup]:
    return list(FileSource(str(path)).groups())
