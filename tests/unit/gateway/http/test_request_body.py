from collections.abc import Sequence

import pytest
from starlette.exceptions import HTTPException

from stepwell.errors import TooLarge
from stepwell.gateway.http.request_body import Message, Receive, limited, read_body


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
    with pytest.raises(TooLarge, match="larger than 0 MiB"):
        await read_body(receiving([b"12345678901"]), largest=10)
    receive = receiving([b"12345", b"678901", b"not read"])
    with pytest.raises(TooLarge):
        await read_body(receive, largest=10)
    assert (await receive())["body"] == b"not read"


async def test_for_fastapi_a_body_that_is_too_large_is_an_http_error() -> None:
    receive = limited(receiving([b"12345", b"67890", b"1"]), largest=10)
    for _ in range(2):
        await receive()
    with pytest.raises(HTTPException, match="413"):
        await receive()
