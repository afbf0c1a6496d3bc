"""What comes compressed, cut off, or as a bomb."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable

import httpx
import pytest
import zstandard

from rig.atropos.server import scored_group, serve_atropos
from rig.local_pool import LocalPool
from stepwell.atropos.group_intake import MAX_SEQUENCES
from stepwell.atropos.http import GZIP, MAX_BODY, decompress
from stepwell.errors import TooLarge

BODY = json.dumps(scored_group()).encode()
JSON = {"content-type": "application/json"}
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("encoding", PACKERS)
async def test_compressed_bodies_are_read(client: httpx.AsyncClient, encoding: str) -> None:
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post("/scored_data", content=PACKERS[encoding](BODY), headers=headers)
    assert answer.json() == {"status": "received"}


async def test_a_gzip_of_several_members_is_read(client: httpx.AsyncClient) -> None:
    content = gzip.compress(BODY[:50]) + gzip.compress(BODY[50:])
    answer = await client.post("/scored_data", content=content, headers={**JSON, "content-encoding": "gzip"})
    assert answer.json() == {"status": "received"}


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("how", ["cut", "garbage", "plain", "tail"])
async def test_what_is_cut_off_or_garbage_is_a_400(
    client: httpx.AsyncClient, pool: LocalPool, encoding: str, how: str
) -> None:
    packed = PACKERS[encoding](BODY)
    broken = {"cut": packed[:-5], "garbage": packed[:20] + b"\xff" * 40, "plain": BODY, "tail": packed + b"tail"}
    answer = await client.post("/scored_data", content=broken[how], headers={**JSON, "content-encoding": encoding})
    assert answer.status_code == 400
    assert encoding in answer.json()["detail"]
    assert pool.transport.messages == []


async def test_an_unknown_encoding_is_a_400(client: httpx.AsyncClient) -> None:
    answer = await client.post("/scored_data", content=BODY, headers={**JSON, "content-encoding": "br"})
    assert answer.status_code == 400
    assert "none of gzip, zstd, identity" in answer.json()["detail"]


@pytest.mark.parametrize("encoding", ["gzip", "zstd", ""])
async def test_a_body_that_grows_beyond_the_bound_is_a_413(encoding: str) -> None:
    bomb = PACKERS[encoding](bytes(2**25)) if encoding else bytes(2**20 + 1)
    assert len(bomb) < 2**20 or not encoding
    headers = {**JSON, "content-encoding": encoding} if encoding else JSON
    async with serve_atropos(LocalPool(), max_body=2**20) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/scored_data", content=bomb, headers=headers)
    assert answer.status_code == 413
    assert answer.json() == {"detail": "the body is larger than 1 MiB"}


async def test_more_sequences_than_a_request_may_have_are_a_413_and_none_is_taken(
    client: httpx.AsyncClient, pool: LocalPool
) -> None:
    count = MAX_SEQUENCES // 4 + 1
    answer = await client.post("/scored_data_list", json=[scored_group(number, 4) for number in range(count)])
    assert answer.status_code == 413
    assert "send several requests" in answer.json()["detail"]
    assert pool.transport.messages == []


def test_a_bomb_takes_no_more_memory_than_the_bound() -> None:
    bomb = zlib.compressobj(wbits=GZIP)
    content = b"".join([bomb.compress(bytes(2**24)) for _ in range(64)]) + bomb.flush()
    tracemalloc.start()
    with pytest.raises(TooLarge):
        decompress(content, "gzip", MAX_BODY)
    assert tracemalloc.get_traced_memory()[1] < 2.2 * MAX_BODY
    tracemalloc.stop()
