"""What a stream may hold that groups_to_arrow never writes."""

from typing import Any

import pyarrow as pa
import pytest

from stepwell.errors import BadRequest
from stepwell.wire.scored_groups import ScoredGroup, group_from_json
from stepwell.wire.scored_groups_arrow import arrow_parts, groups_from_arrow, groups_of_streams, groups_to_arrow

SCHEMA = pa.schema(
    {
        "group": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "mask": pa.list_(pa.bool_()),
        "score": pa.float64(),
        "logprobs": pa.list_(pa.float32()),
        "policy_version": pa.int64(),
        "extras": pa.string(),
    }
)
ROW: dict[str, Any] = {
    "group": 0,
    "tokens": [1, 2],
    "mask": [False, True],
    "score": 1.0,
    "logprobs": [1.0, -0.5],
    "policy_version": None,
    "extras": None,
}


def stream(*rows: dict[str, Any], schema: pa.Schema = SCHEMA) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for row in rows:  # a record batch each, as streams may come
            writer.write_table(pa.Table.from_pylist([row], schema))
    return bytes(sink.getvalue())


def test_rows_of_one_number_that_follow_one_another_are_a_group() -> None:
    rows = [{**ROW, "group": number} for number in (3, 3, 1, 7, 7)]
    assert [len(group) for group in groups_from_arrow(stream(*rows))] == [2, 1, 2]
    assert groups_from_arrow(stream()) == []


def test_columns_without_a_value_need_no_type() -> None:
    row = {**ROW, "logprobs": None}
    table = pa.Table.from_pylist([row, row])
    assert pa.types.is_null(table.schema.field("extras").type)
    (group,) = groups_from_arrow(stream(row, row, schema=table.schema))
    assert (len(group), group.logprobs, group.policy_versions) == (2, None, [None, None])


def test_rows_cut_out_of_a_longer_table_keep_their_own_flags() -> None:
    masks = [[True, False, True], [False, True, True], [True, True, False]]
    rows = [{**ROW, "tokens": [1, 2, 3], "mask": mask, "logprobs": None} for mask in masks]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, SCHEMA).slice(1))
    (group,) = groups_from_arrow(bytes(sink.getvalue()))
    assert group.trained.tolist() == [*masks[1], *masks[2]]


def test_other_integer_and_float_types_and_further_columns_are_taken() -> None:
    schema = pa.schema({**{f.name: f.type for f in SCHEMA}, "tokens": pa.large_list(pa.int64()), "more": pa.int8()})
    (group,) = groups_from_arrow(stream({**ROW, "more": 1}, schema=schema))
    assert group.tokens.tolist() == [1, 2]
    assert group.tokens.dtype == "int32"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": None}, "tokens: a row is null"),
        ({"tokens": []}, "a sequence has no tokens"),
        ({"tokens": [1, None]}, "tokens: an entry is null"),
        ({"tokens": [1, -2]}, "tokens: an id is negative"),
        ({"mask": [True]}, "mask: a row is not as long as its tokens"),
        ({"mask": [True, None]}, "mask: an entry is null"),
        ({"score": float("nan")}, "score: nan is not a finite number"),
        ({"logprobs": [1.0, float("-inf")]}, "logprobs: -inf is not a finite number"),
        ({"logprobs": [1.0]}, "logprobs: a row is not as long"),
        ({"logprobs": [1.0, None]}, "logprobs: an entry is null"),
        ({"group": None}, "group: a row has no group"),
        ({"extras": "no"}, "extras: not JSON"),
        ({"extras": "[]"}, "extras: must be a JSON object"),
        ({"extras": '{"group": 3}'}, '"group" must be an object'),
        ({"extras": '{"exactness": "sure"}'}, "none of engine, submitted, retokenized"),
        ({"extras": '{"group": {"env_id": "x"}}'}, 'env_id: "x" is not an integer'),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        groups_from_arrow(stream(ROW, {**ROW, "group": 1, **change}))


def written(groups: list[ScoredGroup] | Exception) -> bytes | str:
    return str(groups) if isinstance(groups, Exception) else groups_to_arrow(groups)


def test_streams_that_are_read_together_give_what_each_gives_alone() -> None:
    own = groups_to_arrow([group_from_json({"tokens": [[5, 6], [7]], "masks": [[5, 6], [-100]], "scores": [1, 2]})])
    without, numbered = stream({**ROW, "logprobs": None}), stream(ROW, {**ROW, "group": 1})
    bodies = [own, numbered, stream(), without, own, stream({**ROW, "extras": '{"group": {"env_id": 3}}'})]
    alone = [written(groups_from_arrow(body)) for body in bodies]
    assert list(map(written, groups_of_streams(bodies))) == alone
    faulty = [*bodies, b"hello", stream({**ROW, "tokens": []})]
    *sound, no_stream, no_tokens = groups_of_streams(faulty)
    assert list(map(written, sound)) == alone
    assert isinstance(no_stream, BadRequest)
    assert isinstance(no_tokens, BadRequest)


def test_what_is_no_stream_or_is_cut_off_is_refused() -> None:
    whole = groups_to_arrow([group_from_json({"tokens": [[1] * 99], "masks": [[1] * 99], "scores": [1]})])
    for broken in (b"", b"hello", whole[: len(whole) // 2], stream(schema=pa.schema({"group": pa.int32()}))):
        with pytest.raises(BadRequest, match="not an Arrow stream of scored groups"):
            groups_from_arrow(broken)


def test_a_large_batch_is_written_in_pieces_that_are_one_stream() -> None:
    big = group_from_json({"tokens": [[1] * 300_000], "masks": [[1] * 300_000], "scores": [1]})
    parts = list(arrow_parts([big] * 5))
    assert len(parts) == 5
    assert [len(group.tokens) for group in groups_from_arrow(b"".join(parts))] == [300_000] * 5
