"""Batches as Arrow tables, one row a step: what Parquet files and data frames are made from, and read back.

What always holds: `batch_from_arrow(batch.to_arrow())` has the same columns and groups, bit for bit; leases stay
behind, for a copy must not acknowledge anything. A table names the version of its schema and is refused by a Stepwell
that is older. pyarrow is imported when first asked for.
"""

import json
from collections.abc import Iterable
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import Columns
from stepwell.steps.layout import offsets, parts_of, sums, with_logprobs
from stepwell.steps.step import BoolArray, Exactness, IntArray, JsonObject, VersionSpan, ids_array

if TYPE_CHECKING:
    import pyarrow

SCHEMA = 3
"""Raised when a column changes its meaning or a new one must be understood: with 2 came `untrainable`, with 3
`source`."""
READABLE = (b"1", b"2", b"3")
SCHEMA_KEY = b"stepwell.schema"


def batch_to_arrow(batch: Batch) -> "pyarrow.Table":
    pa = _pyarrow()
    group_of_S = parts_of(batch.group_sizes_G)
    of_groups = {
        "group": pa.array(group_of_S, pa.int32()),
        "opened_at": pa.array(batch.opened_at_G[group_of_S]),
        "attempts": pa.array(batch.attempts_G[group_of_S]),
        "from_history": pa.array(batch.from_history_G[group_of_S]),
        "source": pa.array([batch.sources[group] for group in group_of_S.tolist()], pa.string()),
    }
    return pa.table({**of_groups, **_written(batch.columns)}, metadata={SCHEMA_KEY: str(SCHEMA).encode()})


def batch_from_arrow(table: "pyarrow.Table") -> Batch:
    """The batch whose table this is. A group ends where the group's number or its prompt_uid changes."""
    columns = columns_from_arrow(table)
    names = zip(table["group"].to_pylist(), columns.prompt_uids, strict=True)
    sizes = ids_array([len(list(group)) for _, group in groupby(names)])
    firsts = offsets(sizes)[:-1]
    sources = table["source"].to_pylist() if "source" in table.column_names else [""] * len(table)
    return make_batch(
        columns,
        sizes,
        opened_at=_numbers(table["opened_at"], np.float64)[firsts],
        attempts=_numbers(table["attempts"], np.int32)[firsts],
        from_history=_numbers(table["from_history"], np.bool_)[firsts],
        sources=[sources[first] for first in firsts.tolist()],
    )


def columns_from_arrow(table: "pyarrow.Table") -> Columns:
    """The steps of a table, which may be a slice, or read from Parquet in several chunks."""
    _check_schema(table)
    prompts, prompt_lengths = _lists(table["prompt_ids"], np.int32)
    responses, response_lengths = _lists(table["response_ids"], np.int32)
    return Columns(
        tokens=_interleaved(prompts, responses, prompt_lengths, response_lengths),
        logprobs=_optional(table["response_logprobs"], response_lengths, np.float32(np.nan)),
        mask=_optional(table["response_mask"], response_lengths, np.True_),
        prompt_lengths_S=prompt_lengths,
        response_lengths_S=response_lengths,
        rewards_S=_numbers(table["reward"], np.float64),
        reward_revisions_S=_numbers(table["reward_revision"], np.int32),
        step_indexes_S=_numbers(table["step_index"], np.int32),
        policy_versions_S=_numbers(table["policy_version"], np.int64),
        is_last_S=_numbers(table["is_last"], np.bool_),
        started_at_S=_numbers(table["started_at"], np.float64),
        trajectory_uids=table["trajectory_uid"].to_pylist(),
        prompt_uids=table["prompt_uid"].to_pylist(),
        uids=table["uid"].to_pylist(),
        reward_sources=table["reward_source"].to_pylist(),
        metadata=_objects(table["metadata"]),
        version_spans=[tuple(VersionSpan(**span) for span in spans) for spans in table["version_spans"].to_pylist()],
        exactness=[Exactness(value) for value in table["exactness"].to_pylist()],
        finish_reasons=table["finish_reason"].to_pylist(),
        sampling=_objects(table["sampling"]),
        extras=_objects(table["extras"]),
        quarantine=table["quarantine"].to_pylist(),
        untrainable=table["untrainable"].to_pylist() if "untrainable" in table.column_names else [None] * len(table),
    )


# -- writing -----------------------------------------------------------------------------------------------------------


def _written(columns: Columns) -> "dict[str, pyarrow.Array]":
    pa = _pyarrow()
    responses = columns.response_lengths_S
    masked_S = sums(columns.mask, responses) < responses
    in_response = _in_response(columns.prompt_lengths_S, responses)
    return {
        "prompt_uid": pa.array(columns.prompt_uids, pa.string()),
        "trajectory_uid": pa.array(columns.trajectory_uids, pa.string()),
        "uid": pa.array(columns.uids, pa.string()),
        "step_index": pa.array(columns.step_indexes_S),
        "policy_version": pa.array(columns.policy_versions_S),
        "is_last": pa.array(columns.is_last_S),
        "reward": pa.array(columns.rewards_S, mask=np.isnan(columns.rewards_S)),
        "reward_source": pa.array(columns.reward_sources, pa.string()),
        "reward_revision": pa.array(columns.reward_revisions_S),
        "prompt_ids": _list_array(columns.tokens[~in_response], columns.prompt_lengths_S),
        "response_ids": _list_array(columns.tokens[in_response], responses),
        "response_logprobs": _list_array(columns.logprobs, responses, present_S=with_logprobs(columns)),
        "response_mask": _list_array(columns.mask, responses, present_S=masked_S),
        "version_spans": _spans_array(columns.version_spans),
        "exactness": pa.array([str(value) for value in columns.exactness], pa.string()),
        "finish_reason": pa.array(columns.finish_reasons, pa.string()),
        "started_at": pa.array(columns.started_at_S),
        "quarantine": pa.array(columns.quarantine, pa.string()),
        "untrainable": pa.array(columns.untrainable, pa.string()),
        "metadata": _json_array(columns.metadata),
        "sampling": _json_array(columns.sampling),
        "extras": _json_array(columns.extras),
    }


def _list_array(flat: NDArray[Any], lengths_S: IntArray, present_S: BoolArray | None = None) -> "pyarrow.ListArray":
    """One list a step, null where it is not present. Made from the flat array, never from Python lists."""
    pa = _pyarrow()
    if present_S is None:
        return pa.ListArray.from_arrays(pa.array(offsets(lengths_S), pa.int32()), pa.array(flat))
    kept = pa.array(flat[np.repeat(present_S, lengths_S)])
    ends = pa.array(offsets(np.where(present_S, lengths_S, 0)), pa.int32())
    return pa.ListArray.from_arrays(ends, kept, mask=pa.array(~present_S))


def _spans_array(spans_S: list[tuple[VersionSpan, ...]]) -> "pyarrow.ListArray":
    pa = _pyarrow()
    flat = np.array(list(chain.from_iterable(spans_S)), np.int64).reshape(-1, 3)
    parts = [pa.array(flat[:, field], pa.int64()) for field in range(3)]
    ends = pa.array(offsets(np.array([len(spans) for spans in spans_S], np.int32)), pa.int32())
    return pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays(parts, VersionSpan._fields))


def _json_array(values: Iterable[JsonObject]) -> "pyarrow.Array":
    pa = _pyarrow()
    return pa.array([json.dumps(dict(value)) for value in values], pa.string())


# -- reading -----------------------------------------------------------------------------------------------------------


def _check_schema(table: "pyarrow.Table") -> None:
    found = (table.schema.metadata or {}).get(SCHEMA_KEY)
    if found is None:
        raise BadRequest("the table has no stepwell.schema in its metadata: was it made by Batch.to_arrow?")
    if found not in READABLE:
        raise BadRequest(
            f"the table has schema version {found.decode()}, this Stepwell reads up to {SCHEMA}: install a newer one"
        )


def _lists(column: "pyarrow.ChunkedArray", dtype: type[np.generic]) -> tuple[NDArray[Any], IntArray]:
    """A column of lists: their elements one after the other, and their lengths, 0 for null."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return _numbers(pc.list_flatten(column), dtype), _numbers(lengths, np.int32)


def _optional(column: "pyarrow.ChunkedArray", lengths_S: IntArray, absent: np.generic) -> NDArray[Any]:
    """The elements of lists that are null or of these lengths, with `absent` throughout those that are null."""
    given, _ = _lists(column, type(absent))
    values = np.full(lengths_S.sum(), absent)
    values[np.repeat(column.is_valid().to_numpy(), lengths_S)] = given
    return values


def _numbers(column: "pyarrow.ChunkedArray", dtype: type[np.generic]) -> NDArray[Any]:
    """Null becomes NaN."""
    return np.asarray(column.to_numpy(), dtype)


def _objects(column: "pyarrow.ChunkedArray") -> list[JsonObject]:
    return [json.loads(text) for text in column.to_pylist()]


# -- prompts and responses in one array --------------------------------------------------------------------------------


def _in_response(prompt_lengths_S: IntArray, response_lengths_S: IntArray) -> BoolArray:
    """For each token of prompt, response, prompt, response, …: is it a response's?"""
    both = np.stack([prompt_lengths_S, response_lengths_S], axis=1).ravel()
    return np.repeat(np.tile([False, True], len(prompt_lengths_S)), both)


def _interleaved(
    prompts: IntArray, responses: IntArray, prompt_lengths_S: IntArray, response_lengths_S: IntArray
) -> IntArray:
    in_response = _in_response(prompt_lengths_S, response_lengths_S)
    tokens = np.empty(len(in_response), np.int32)
    tokens[in_response] = responses
    tokens[~in_response] = prompts
    return tokens


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as missing:
        raise BadRequest("Arrow tables need pyarrow: pip install 'stepwell[arrow]'") from missing
    return pyarrow
