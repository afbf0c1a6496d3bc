"""Reading a request: ASGI types, and the limits on its size."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from stepwell.common.user_input import LARGEST_READ, MOST_CONTAINERS, brackets, check_containers, too_many_text
from stepwell.errors import TooLarge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LARGEST_BODY = 64 * 1024 * 1024


def declared_length(headers: Headers) -> int | None:
    """The length in the header Content-Length; None for a body that comes in chunks."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None


async def read_body(
    receive: Receive, largest: int = LARGEST_BODY, *, on_part: Callable[[int], None] | None = None
) -> bytes:
    """The whole body. TooLarge as soon as it is longer than `largest`, or long and of too many objects and lists.
    `on_part` is told the size of each part."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if on_part is not None:
        on_part(len(body))
    if message.get("more_body"):
        parts = [body]
        size, containers = len(body), brackets(body)
        while message.get("more_body") and size <= largest:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            containers += brackets(parts[-1])
            if size > LARGEST_READ and containers > MOST_CONTAINERS:
                raise TooLarge(too_many_text(MOST_CONTAINERS))
            if on_part is not None:
                on_part(len(parts[-1]))
        body = b"".join(parts)
    if len(body) > largest:
        raise TooLarge(too_large_text(largest))
    return body


def limited(receive: Receive, largest: int = LARGEST_BODY) -> Receive:
    """`receive`, which gives the whole body at once, or refuses one that is too large or has too many objects and
    lists. FastAPI would take any other exception for bad JSON."""
    is_read = False

    async def receive_limited() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        try:
            body = await read_body(receive, largest)
            check_containers(body)
        except TooLarge as failure:
            raise HTTPException(413, str(failure)) from None
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_limited


def too_large_text(largest: int) -> str:
    size = f"{largest >> 20} MiB" if largest >> 20 else f"{largest >> 10} KiB"
    return f"the request body is larger than {size}"
