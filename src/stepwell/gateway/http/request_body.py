"""Reading a request: ASGI types, and the limits on its size."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from stepwell.errors import TooLarge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LARGEST_BODY = 64 * 1024 * 1024
LARGEST_HEADERS = 64 * 1024


async def read_body(receive: Receive, largest: int = LARGEST_BODY) -> bytes:
    """The whole body. TooLarge as soon as it is longer than `largest`."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        parts = [body]
        size = len(body)
        while message.get("more_body") and size <= largest:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
        body = b"".join(parts)
    if len(body) > largest:
        raise TooLarge(too_large_text(largest))
    return body


def limited(receive: Receive, largest: int = LARGEST_BODY) -> Receive:
    """`receive`, which refuses a body that is too large. FastAPI would take any other exception for bad JSON."""
    size = 0

    async def receive_limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > largest:
            raise HTTPException(413, too_large_text(largest))
        return message

    return receive_limited


def too_large_text(largest: int) -> str:
    return f"the request body is larger than {largest >> 20} MiB"
