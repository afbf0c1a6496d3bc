from collections.abc import Sequence

import pytest
from starlette.exceptions import HTTPException
from stepwell.common.user_input import LARGEST_READ, MOST_CONTAINERS
from stepwell.gateway.requests import Message, Receive, limited, read_body

from stepwell.errors import TooLarge


def receiving(parts: Sequence[bytes]) -> Receive:
    coming = list(parts)

    async def receive() -> Message:
        body = coming.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(coming)}

    return receive


@pytest.mark.parametrize("parts", [[b""], [b"1234567890"], [b"12345", b"", b"67890"]])
async def test_a_body_is_read_to_its_end(parts: list[bytes]) -> None:
    assert await read_body(receiving(parts), largest=10) == b"".join(parts)


async def test_a_body_that_is_too_large_is_not_read_to_its_end() -> None:
    with pytest.raises(TooLarge, match="larger than 0 KiB"):
        await read_body(receiving([b"12345678901"]), largest=10)
    receive = receiving([b"12345", b"678901", b"not read"])
    with pytest.raises(TooLarge):
        await read_body(receive, largest=10)
    assert (await receive())["body"] == b"not read"


async def test_for_fastapi_a_body_comes_at_once_and_what_follows_it_comes_as_it_is() -> None:
    parts = [b"12345", b"67890"]
    receive = limited(receiving([*parts, b"next"]), largest=20)
    assert (await receive())["body"] == b"1234567890next"
    receive = limited(receiving(parts), largest=10)
    assert await receive() == {"type": "http.request", "body": b"1234567890", "more_body": False}
    with pytest.raises(IndexError):
        await receive()


@pytest.mark.parametrize("parts", [[b"12345", b"67890", b"1"], [b"[" + b"[]," * MOST_CONTAINERS + b"[]]"]])
async def test_for_fastapi_a_body_that_is_too_large_is_an_http_error(parts: list[bytes]) -> None:
    with pytest.raises(HTTPException, match="413"):
        await limited(receiving(parts), largest=10 if len(parts) > 1 else 2**20)()


async def test_a_long_body_of_many_lists_is_refused_before_it_is_read_whole() -> None:
    receive = receiving([b"[]," * (LARGEST_READ // 12)] * 16)
    with pytest.raises(TooLarge, match="objects and lists"):
        await read_body(receive)
    assert (await receive())["more_body"], "everything was read"


async def test_a_long_text_is_read_whole() -> None:
    parts = [b'"' + b"text [1] " * (LARGEST_READ // 40_000), *[b"a" * (LARGEST_READ // 4)] * 6]
    assert await read_body(receiving(parts)) == b"".join(parts)
