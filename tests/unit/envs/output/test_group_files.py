"""Groups come back from disk as they were written."""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.envs.group_files import GroupFolder, GroupTable, rows_of

from rig.group_files import group_of, read_lines, read_table
from stepwell.errors import BadRequest

GROUP: dict[str, Any] = {
    "tokens": [[1, 2, 3], [1, 4]],
    "masks": [[-100, 2, 3], [-100, 4]],
    "scores": [1.0, 0.1],
    "inference_logprobs": [[1.0, -0.1, -0.30000000000000004], [1.0, -2.5]],
    "policy_versions": [3, None],
    "exactness": ["engine", "retokenized"],
    "messages": [[{"role": "user", "content": "é\n\u2028<"}], [{"role": "user", "content": [{"type": "text"}]}]],
    "overrides": [{"lr": 0.1}, {}],
    "group_overrides": {"beta": 1},
    "generation_params": {"temperature": 0.7},
    "env_id": 4,
    "mine": {"difficulty": [1, 2, 3]},
}
BARE: dict[str, Any] = {"tokens": [[7]], "masks": [[7]], "scores": [0.0]}


def test_groups_come_back_equal_from_lines_and_from_the_table(tmp_path: Path) -> None:
    folder = GroupFolder(tmp_path / "out", "test")
    for group in (GROUP, BARE, GROUP):
        folder.write(group)
    folder.close()
    assert list(read_lines(tmp_path / "out" / "groups.jsonl")) == [GROUP, BARE, GROUP]
    assert list(read_table(tmp_path / "out" / "groups.parquet")) == [GROUP, BARE, GROUP]
    assert (tmp_path / "out" / "groups.html").read_text().count("<article") == 3
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"groups.jsonl", "groups.parquet", "groups.html"}


def lists_of(n: int, of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, min_size=n, max_size=n)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 3))
    made: dict[str, Any] = {key: draw(lists_of(n, ids)) for key in ("tokens", "masks")}
    made["scores"] = draw(lists_of(n, numbers))
    optional = {
        "inference_logprobs": lists_of(n, st.lists(numbers, max_size=5)),
        "advantages": lists_of(n, st.lists(numbers, max_size=3)),
        "messages": lists_of(n, st.lists(st.dictionaries(st.text(), st.text()), max_size=2)),
        "distill_token_ids": lists_of(n, st.lists(ids, max_size=2)),
        "group_overrides": st.dictionaries(st.text(), numbers),
    }
    for key in draw(st.sets(st.sampled_from(sorted(optional)))):
        made[key] = draw(optional[key])
    return made


@given(groups())
def test_any_group_is_the_same_after_it_was_rows(group: dict[str, Any]) -> None:
    assert group_of(rows_of(0, group)) == group


def test_arrays_are_written_as_lists(tmp_path: Path) -> None:
    folder = GroupFolder(tmp_path, "test")
    folder.write(
        {
            "tokens": [np.array([1, 2], np.int32)],
            "masks": [np.array([-100, 2])],
            "scores": np.array([0.5]),
            "advantages": [np.array([0.25, 0.5])],
        }
    )
    folder.close()
    expected = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.5], "advantages": [[0.25, 0.5]]}
    assert list(read_lines(tmp_path / "groups.jsonl")) == [expected]
    assert list(read_table(tmp_path / "groups.parquet")) == [expected]


def test_text_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    folder = GroupFolder(tmp_path, "test")
    folder.write({**BARE, "messages": [[{"role": "user", "content": "half a pair: \ud83d"}]]})
    folder.close()
    (group,) = read_lines(tmp_path / "groups.jsonl")
    assert group["messages"][0][0]["content"] == "half a pair: \ud83d"
    assert "half a pair: \\ud83d" in (tmp_path / "groups.html").read_text()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "groups.parquet").write_text("mine")
    with pytest.raises(BadRequest, match="already has a groups.parquet: name another folder"):
        GroupFolder(tmp_path, "test")
    assert (tmp_path / "groups.parquet").read_text() == "mine"
    assert not (tmp_path / "groups.jsonl").exists()


def test_lines_can_be_read_while_more_are_written_and_the_table_when_it_is_whole(tmp_path: Path) -> None:
    folder = GroupFolder(tmp_path, "test")
    folder.write(GROUP)
    assert list(read_lines(tmp_path / "groups.jsonl")) == [GROUP]
    assert not (tmp_path / "groups.parquet").exists()
    folder.close()
    assert list(read_table(tmp_path / "groups.parquet")) == [GROUP]


def test_memory_does_not_grow_with_the_number_of_groups(tmp_path: Path) -> None:
    group = {"tokens": [list(range(1_000))] * 4, "masks": [list(range(1_000))] * 4, "scores": [0.0, 1.0, 0.0, 1.0]}
    table = GroupTable(tmp_path / "groups.parquet", row_group_tokens=20_000)
    peaks = []
    for count in (10, 100):
        tracemalloc.start()
        for _ in range(count):
            table.write(group)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    table.close()
    assert peaks[1] < 1.5 * peaks[0] + 200_000, "90 more groups have more than 2 MB"
    file = pq.ParquetFile(tmp_path / "groups.parquet")
    assert file.num_row_groups == math.ceil(110 * 4_000 / 20_000)
    file.close()
    assert sum(1 for _ in read_table(tmp_path / "groups.parquet")) == 110


def test_the_table_is_plain_parquet(tmp_path: Path) -> None:
    table = GroupTable(tmp_path / "groups.parquet")
    table.write(GROUP)
    table.close()
    read = pq.read_table(tmp_path / "groups.parquet")
    assert read["group"].to_pylist() == [0, 0]
    assert read["score"].to_pylist() == [1.0, 0.1]
    assert json.loads(read["extras"][0].as_py())["messages"] == GROUP["messages"][0]
