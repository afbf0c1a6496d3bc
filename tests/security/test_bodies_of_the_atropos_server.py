"""What a body may become in the Atropos server's memory, also after it is decompressed."""

import gzip
import zlib
from io import BytesIO
from typing import Any

import httpx
import orjson
import pyarrow as pa
import pytest
import zstandard
from stepwell.common.user_input import MOST_CONTAINERS

from rig.atropos.server import serve_atropos
from rig.local_pool import LocalPool
from stepwell.atropos import http
from stepwell.atropos.http import FIRST_PIECE, MOST_MEMBERS, SMALL_BODY, Unreadable, decompress
from stepwell.errors import BadRequest, TooLarge
from stepwell.wire.scored_groups import groups_from_json
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_from_arrow
from tests.unit.wire.test_scored_groups_arrow import ROW, SCHEMA, stream

LISTS = b'{"tokens": [' + b"[]," * (2 * MOST_CONTAINERS) + b'[]], "masks": [], "scores": []}'
COMPRESSED = {
    "identity": LISTS,
    "gzip": gzip.compress(LISTS),
    "zstd": zstandard.compress(LISTS),
}
LARGE = 2**26


class CountingZlib:
    """zlib, which counts the bytes that it is given."""

    MAX_WBITS, error = zlib.MAX_WBITS, zlib.error

    def __init__(self) -> None:
        self.given = 0

    def decompressobj(self, wbits: int) -> Any:
        counting, stream = self, zlib.decompressobj(wbits)

        class Counted:
            eof = property(lambda _: stream.eof)
            unused_data = property(lambda _: stream.unused_data)
            unconsumed_tail = property(lambda _: stream.unconsumed_tail)

            def decompress(self, data: bytes, max_length: int = 0) -> bytes:
                counting.given += len(data)
                return stream.decompress(data, max_length)

        return Counted()


@pytest.mark.parametrize("text", [b"", b"a", b"a" * 100])
def test_many_members_of_gzip_are_read_in_a_time_that_grows_with_the_body(
    monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    body = gzip.compress(text) * 5_000
    counting = CountingZlib()
    monkeypatch.setattr(http, "zlib", counting)
    assert decompress(body, "gzip", LARGE) == text * 5_000
    assert counting.given <= 5_000 * FIRST_PIECE


def test_a_gzip_body_has_a_bound_of_members() -> None:
    assert decompress(gzip.compress(b"a") * MOST_MEMBERS, "gzip", LARGE) == b"a" * MOST_MEMBERS
    with pytest.raises(Unreadable, match="more than 10000 members"):
        decompress(gzip.compress(b"a") * (MOST_MEMBERS + 1), "gzip", LARGE)


@pytest.mark.parametrize("size", [1, FIRST_PIECE - 1, 100_000, 3_000_000])
def test_members_of_any_length_are_read_to_their_end(size: int) -> None:
    parts = [bytes(range(256)) * (size // 256 + 1), b"", b"end"]
    body = b"".join(map(gzip.compress, parts))
    assert decompress(body, "gzip", LARGE) == b"".join(parts)
    for cut in (1, len(body) // 2, len(body) - 1):
        with pytest.raises(Unreadable):
            decompress(body[:cut], "gzip", LARGE)
    with pytest.raises(Unreadable, match="not gzip"):
        decompress(body + b"more", "gzip", LARGE)
    with pytest.raises(TooLarge):
        decompress(body, "gzip", size // 2)


@pytest.mark.parametrize("encoding", COMPRESSED)
@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
async def test_many_small_lists_are_refused_before_they_are_parsed(path: str, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with serve_atropos(LocalPool()) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(path, content=COMPRESSED[encoding], headers=headers)
    assert answer.status_code == 413, answer.text
    assert "objects and lists" in answer.text


def test_a_list_for_each_token_is_no_attack() -> None:
    tokens = list(range(10_000, 10_000 + MOST_CONTAINERS + 1))
    group = {
        "tokens": [tokens],
        "masks": [tokens],
        "scores": [1.0],
        "distill_token_ids": [[[token, token] for token in tokens]],
    }
    (read,) = groups_from_json(orjson.dumps(group), kind="group")
    assert len(read.tokens) == len(tokens)


@pytest.mark.parametrize("path", ["/register", "/register-env", "/disconnect-env", "/batch/ack", "/batch/nack"])
async def test_a_call_without_groups_is_small(path: str) -> None:
    body = b'{"more": "' + b"a" * SMALL_BODY + b'"}'
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with serve_atropos(LocalPool()) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(path, content=gzip.compress(body), headers=headers)
    assert answer.status_code == 413, answer.text


def arrow(array: pa.Array | None = None, compression: str | None = None) -> bytes:
    """A stream of one row; `array` is its tokens."""
    table = pa.Table.from_pylist([ROW], SCHEMA)
    if array is not None:
        table = table.set_column(1, "tokens", array)
    sink = BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("array", [None, pa.array([[1, 2]], pa.large_list(pa.int64()))], ids=["usual", "other type"])
def test_values_that_are_compressed_within_arrow_are_refused(compression: str, array: pa.Array | None) -> None:
    assert len(groups_from_arrow(arrow(array))) == 1
    with pytest.raises(BadRequest, match="compressed buffers"):
        groups_from_arrow(arrow(array, compression))


def test_so_are_those_of_a_column_that_is_not_read() -> None:
    table = pa.Table.from_pylist([ROW], SCHEMA).append_column("more", pa.array([bytes(10_000)]))
    sink = BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    with pytest.raises(BadRequest, match="compressed buffers"):
        groups_from_arrow(sink.getvalue())


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([[1, 2]], pa.list_(pa.int32()))), "dictionaries"),
        (pa.ListViewArray.from_arrays([0], [2], pa.array([1, 2], pa.int32())), "the type list_view"),
        (pa.RunEndEncodedArray.from_arrays([1], pa.array([1], pa.int32())), "the type run_end_encoded"),
        (pa.nulls(1), "the type null"),
        (pa.array([[[1], [2]]]), "the type list<item: list"),
    ],
    ids=["dictionary", "view", "run-end", "null", "nested"],
)
def test_types_whose_values_swell_when_they_are_read_are_refused(array: pa.Array, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        groups_from_arrow(arrow(array))


def test_a_mask_longer_than_its_tokens_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    body = stream({**ROW, "mask": [True] * 1_000})
    monkeypatch.setattr("numpy.unpackbits", None)
    with pytest.raises(BadRequest, match="mask: a row is not as long as its tokens"):
        groups_from_arrow(body)


def test_the_json_in_arrow_is_bounded_over_all_rows() -> None:
    half = '{"a": [' + "[]," * (MOST_CONTAINERS // 2) + "[]]}"
    assert len(groups_from_arrow(stream({**ROW, "extras": half}))) == 1
    with pytest.raises(TooLarge, match="objects and lists"):
        groups_from_arrow(stream({**ROW, "extras": half}, {**ROW, "extras": half}))


async def test_an_arrow_body_that_swells_is_refused_with_a_sentence() -> None:
    async with serve_atropos(LocalPool()) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(
            "/scored_data", content=arrow(compression="zstd"), headers={"Content-Type": MEDIA_TYPE}
        )
    assert answer.status_code == 422
    assert "compress the whole body instead" in answer.text
