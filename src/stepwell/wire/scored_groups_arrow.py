"""Scored groups as an Arrow stream, one row per sequence. It takes a tenth of JSON's time on both sides.

Columns: group, tokens, mask, score, logprobs, policy_version, extras. Further fields of a sequence are a JSON object in
`extras`; those of the group are in the first row's object, as "group".

Invariants:
- `groups_from_arrow(groups_to_arrow(groups))` gives the same groups.
- The rules are those of JSON, except that a score may be null in a batch for a trainer.
- Streams that are read together give what each gives alone: a fault in one is told for that one.
- A stream takes a few times the memory of its bytes. What would swell when it is read is refused.
- pyarrow is imported when it is first used.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from stepwell.common.imports import require
from stepwell.common.user_input import check_containers
from stepwell.errors import BadRequest
from stepwell.steps.arrow import list_array
from stepwell.steps.layout import IndexArray, offsets
from stepwell.steps.step import Exactness, Json
from stepwell.wire.scored_groups import (
    ScoredGroup,
    read_env_id,
    read_grade,
    require_finite,
    require_ids,
    require_writable,
    with_missing_logprobs,
)

if TYPE_CHECKING:
    import pyarrow

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
GROUP = "group"
GRADE = "exactness"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
TOKENS_A_PIECE = 2**19
"""The most tokens of a piece, so that it is written within some milliseconds."""


def has_arrow() -> bool:
    return find_spec("pyarrow") is not None


def groups_to_arrow(groups: Iterable[ScoredGroup]) -> bytes:
    return b"".join(arrow_parts(groups))


def arrow_parts(groups: Iterable[ScoredGroup]) -> Iterator[bytes]:
    """The stream, piece by piece."""
    yield _schema_message()
    first, some, tokens = 0, list[ScoredGroup](), 0
    for group in groups:
        some.append(group)
        tokens += len(group.tokens)
        if tokens >= TOKENS_A_PIECE:
            yield _record_batch(some, first).serialize().to_pybytes()
            first, some, tokens = first + len(some), [], 0
    if some:
        yield _record_batch(some, first).serialize().to_pybytes()
    yield END_OF_STREAM


def groups_from_arrow(body: bytes) -> list[ScoredGroup]:
    """The groups of a stream. BadRequest says what is wrong with it."""
    return _read_together([body])[0]


def groups_of_streams(bodies: Sequence[bytes]) -> list[list[ScoredGroup] | Exception]:
    """The groups of each stream, or what is wrong with it. They are read in one pass: most of the time that a small
    stream takes is not for its tokens."""
    if len(bodies) > 1:
        with suppress(BadRequest):  # which one is faulty is found by reading each alone
            return list(_read_together(bodies))
    return [_read_alone(body) for body in bodies]


def _read_alone(body: bytes) -> list[ScoredGroup] | Exception:
    try:
        return groups_from_arrow(body)
    except BadRequest as failure:
        return failure


def _read_together(bodies: Sequence[bytes]) -> list[list[ScoredGroup]]:
    streams = [_sound_rows(body) for body in bodies]
    ends = list(accumulate(map(len, streams)))
    if not ends[-1]:
        return [[] for _ in bodies]
    rows = streams[0] if len(streams) == 1 else _joined_rows(streams)
    columns = dict(zip(_schema().names, rows.columns, strict=True))
    runs = _runs(columns["group"], ends)
    groups, starts = _groups(columns, runs), [start for start, _ in runs]
    return [groups[first:last] for first, last in pairwise([0, *(bisect_left(starts, end) for end in ends)])]


# -- writing -----------------------------------------------------------------------------------------------------------


def _record_batch(groups: Sequence[ScoredGroup], first: int) -> "pyarrow.RecordBatch":
    pa = _pyarrow()
    lengths = np.concatenate([group.lengths_N for group in groups])
    tokens, trained = _joined([group.tokens for group in groups]), _joined([group.trained for group in groups])
    scores = np.concatenate([group.scores_N for group in groups])
    columns = [
        pa.array(np.repeat(np.arange(first, first + len(groups), dtype=np.int32), [len(group) for group in groups])),
        list_array(tokens, lengths),
        list_array(trained, lengths),
        pa.array(scores, mask=np.isnan(scores)),
        _logprob_lists(groups, lengths),
        pa.array([version for group in groups for version in group.policy_versions], pa.int64()),
        pa.array([text for group in groups for text in _extra_texts(group)], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_schema())


def _logprob_lists(groups: Sequence[ScoredGroup], lengths: IndexArray) -> "pyarrow.Array":
    pa = _pyarrow()
    if all(group.logprobs is None for group in groups):
        return pa.nulls(len(lengths), pa.list_(pa.float32()))
    logprobs = _joined([_known_logprobs(group) for group in groups])
    present = ~np.isnan(logprobs[offsets(lengths)[:-1]])
    return list_array(logprobs, lengths, None if present.all() else present)


def _known_logprobs(group: ScoredGroup) -> NDArray[np.float32]:
    return np.full(len(group.tokens), np.nan, np.float32) if group.logprobs is None else group.logprobs


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _extra_texts(group: ScoredGroup) -> Iterator[str | None]:
    of_group: dict[str, Json] = dict(group.extras)
    if group.env_id is not None:
        of_group["env_id"] = group.env_id
    for place, (own, grade) in enumerate(zip(group.extras_N, group.exactness, strict=True)):
        extras = dict(own)
        if grade is not Exactness.SUBMITTED:
            extras[GRADE] = grade.value
        if place == 0 and of_group:
            extras[GROUP] = of_group
        yield orjson.dumps(extras).decode() if extras else None


# -- reading -----------------------------------------------------------------------------------------------------------


def _sound_rows(body: bytes) -> "pyarrow.RecordBatch":
    pa = _pyarrow()
    try:
        rows = _single_batch(body)
        if rows is None:
            rows = _rows(body)
        rows.validate(full=True)
    except (pa.ArrowException, KeyError, EOFError, OSError, struct.error) as failure:
        raise BadRequest(f"the body is not an Arrow stream of scored groups: {failure}") from None
    return rows


def _single_batch(body: bytes) -> "pyarrow.RecordBatch | None":
    """The batch of a stream with one record batch, as `groups_to_arrow` writes it: its schema is known. None for
    others."""
    pa, schema = _pyarrow(), _schema_message()
    if not body.startswith(schema) or len(body) == len(schema) + len(END_OF_STREAM):
        return None
    reader = pa.BufferReader(body)
    reader.seek(len(schema))
    message = pa.ipc.read_message(reader)
    if message.type != "record batch" or body[reader.tell() :] != END_OF_STREAM:
        return None
    _require_plain(message)
    return pa.ipc.read_record_batch(message, _schema())


def _joined_rows(streams: "list[pyarrow.RecordBatch]") -> "pyarrow.RecordBatch":
    (rows,) = _pyarrow().Table.from_batches(streams, _schema()).combine_chunks().to_batches()
    return rows


def _rows(body: bytes) -> "pyarrow.RecordBatch":
    """All rows of a stream. Most streams have one record batch."""
    pa = _pyarrow()
    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(body)):
        _require_plain(message)
    stream = pa.ipc.open_stream(body, options=_read_options())
    batches = list(stream)
    if len(batches) == 1 and stream.schema.equals(_schema()):
        return batches[0]
    for batch in batches:
        batch.validate(full=True)  # the cast trusts them
    table = pa.Table.from_batches(batches, stream.schema).select(_schema().names)
    for column in table.schema:
        _require_plain_type(column)
    return pa.RecordBatch.from_struct_array(table.cast(_schema()).to_struct_array().combine_chunks())


def _require_plain(message: "pyarrow.ipc.Message") -> None:
    """BadRequest for values that are compressed within Arrow, which a kilobyte of could fill the memory."""
    header = _field(message.metadata, _table(message.metadata, 0), 2)
    if message.type == "dictionary" or (message.type == "record batch" and _field(message.metadata, header, 3)):
        raise BadRequest("the Arrow stream has dictionaries or compressed buffers; compress the whole body instead")


def _table(metadata: "pyarrow.Buffer", at: int) -> int:
    """Where a table of flatbuffers is to which the offset at this place points."""
    (offset,) = struct.unpack_from("<I", metadata, at)
    return at + int(offset)


def _field(metadata: "pyarrow.Buffer", table: int, number: int) -> int:
    """Where the table is that this field of a table points to; 0 if the field is not set."""
    (back,) = struct.unpack_from("<i", metadata, table)
    size, _, *places = struct.unpack_from(f"<{3 + number}H", metadata, table - back)
    is_set = size >= 2 * (3 + number) and places[-1]
    return _table(metadata, table + places[-1]) if is_set else 0


def _require_plain_type(column: "pyarrow.Field") -> None:
    """BadRequest for a type whose values refer to others, so that a cast copies them again and again."""
    types, found = _pyarrow().types, column.type
    if types.is_list(found) or types.is_large_list(found):
        found = found.value_type
    is_number = types.is_integer(found) or types.is_floating(found) or types.is_boolean(found)
    is_text = types.is_string(found) or types.is_large_string(found)
    is_empty = types.is_null(found) and column.name != "tokens"  # as many rows as tokens has
    if not (is_number or is_text or is_empty):
        raise BadRequest(f"{column.name}: the type {column.type} is not read; send lists of numbers, numbers and texts")


def _groups(columns: "dict[str, pyarrow.Array]", runs: Iterable[tuple[int, int]]) -> list[ScoredGroup]:
    lengths, tokens = _lists_of(columns, "tokens")
    require_ids(tokens, lengths)
    _, trained = _lists_of(columns, "mask", lengths)
    scores = columns["score"].to_numpy(zero_copy_only=False)
    require_finite("score", scores[_is_valid(columns["score"])])
    logprobs = _read_logprobs(columns, lengths)
    versions, extras = columns["policy_version"].to_pylist(), _objects(columns["extras"].to_pylist())
    places, lengths_N = offsets(lengths).tolist(), lengths.astype(np.int64)
    return [
        _group(
            extras[start:end],
            tokens=tokens[places[start] : places[end]],
            trained=trained[places[start] : places[end]],
            logprobs=None if logprobs is None else logprobs[places[start] : places[end]],
            lengths_N=lengths_N[start:end],
            scores_N=scores[start:end],
            policy_versions=versions[start:end],
        )
        for start, end in runs
    ]


def _runs(numbers: "pyarrow.Array", ends: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each run of the same number in a stream. `ends` are those of the streams."""
    if numbers.null_count:
        raise BadRequest("group: a row has no group")
    own = numbers.to_numpy()
    changes = ((own[1:] != own[:-1]).nonzero()[0] + 1).tolist()
    return list(pairwise(sorted({0, *changes, *ends})))


def _group(extras: list[dict[str, Json]], **arrays: Any) -> ScoredGroup:
    of_group = extras[0].pop(GROUP, None) or {}
    if not isinstance(of_group, dict):
        raise BadRequest(f'extras: "{GROUP}" must be an object')
    grades = [read_grade(GRADE, own.pop(GRADE)) if GRADE in own else Exactness.SUBMITTED for own in extras]
    if arrays["logprobs"] is not None and np.isnan(arrays["logprobs"][0]) and np.isnan(arrays["logprobs"]).all():
        arrays["logprobs"] = None
    env_id = read_env_id(of_group.pop("env_id", None))
    return ScoredGroup(exactness=grades, extras_N=extras, extras=of_group, env_id=env_id, **arrays)


def _lists_of(
    columns: "dict[str, pyarrow.Array]", name: str, lengths: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """The length of each row, and the values of all rows. BadRequest if the rows have other lengths than `lengths`."""
    lists = columns[name]
    if lists.null_count:
        raise BadRequest(f"{name}: a row is null")
    places = lists.offsets.to_numpy()
    own, values = places[1:] - places[:-1], lists.values[places[0] : places[-1]]
    if lengths is not None and not np.array_equal(own, lengths):
        raise BadRequest(f"{name}: a row is not as long as its tokens")
    if values.null_count:
        raise BadRequest(f"{name}: an entry is null")
    return own, _as_numpy(values)


def _as_numpy(values: "pyarrow.Array") -> NDArray[Any]:
    """A view, except for booleans: Arrow stores bits, and numpy unpacks them four times as fast as Arrow."""
    if not len(values) or values.type.bit_width > 1:
        plain: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return plain
    skipped, first = divmod(values.offset, 8)
    bits = np.frombuffer(values.buffers()[1], np.uint8)[skipped:]
    return np.unpackbits(bits, count=first + len(values), bitorder="little")[first:].view(np.bool_)


def _is_valid(column: "pyarrow.Array") -> NDArray[np.bool_]:
    if not column.null_count:
        return np.ones(len(column), np.bool_)
    valid: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _read_logprobs(columns: "dict[str, pyarrow.Array]", lengths: NDArray[np.int32]) -> NDArray[np.float32] | None:
    lists = columns["logprobs"]
    if lists.null_count == len(lists):
        return None
    has = _is_valid(lists)
    _, given = _lists_of({"logprobs": lists.drop_null() if lists.null_count else lists}, "logprobs", lengths[has])
    require_finite("logprobs", given)
    return with_missing_logprobs(given, has, lengths)


def _objects(texts: Sequence[str | None]) -> list[dict[str, Json]]:
    check_containers("".join(filter(None, texts)).encode())
    return list(map(_object, texts))


def _object(text: str | None) -> dict[str, Json]:
    if text is None:
        return {}
    try:
        read = orjson.loads(text)
    except orjson.JSONDecodeError as failure:
        raise BadRequest(f"extras: not JSON: {failure}") from None
    if not isinstance(read, dict):
        raise BadRequest("extras: must be a JSON object")
    require_writable([read])
    return read


@cache
def _schema() -> "pyarrow.Schema":
    pa = _pyarrow()
    return pa.schema(
        [
            ("group", pa.int32()),
            ("tokens", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.bool_())),
            ("score", pa.float64()),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_version", pa.int64()),
            ("extras", pa.string()),
        ]
    )


@cache
def _schema_message() -> bytes:
    """How a stream begins."""
    message: bytes = _schema().serialize().to_pybytes()
    return message


@cache
def _read_options() -> "pyarrow.ipc.IpcReadOptions":
    return _pyarrow().ipc.IpcReadOptions(use_threads=False)


@cache
def _pyarrow() -> Any:
    require("pyarrow.ipc", "envs", purpose="Arrow")
    return require("pyarrow", "envs", purpose="Arrow")
