"""Reading a request: ASGI types, and the limits on its size."""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from stepwell.errors import TooLarge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LARGEST_BODY = 64 * 1024 * 1024
MOST_CONTAINERS = 250_000
"""Objects and lists in a body. Each takes twenty times as much memory as its two brackets."""
LARGEST_READ = 8 * 1024 * 1024
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def declared_length(headers: Headers) -> int | None:
    """What the header Content-Length says; None for a body that comes in chunks."""
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
        size, containers = len(body), _brackets(body)
        while message.get("more_body") and size <= largest:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            containers += _brackets(parts[-1])
            if size > LARGEST_READ and containers > MOST_CONTAINERS:
                raise TooLarge(too_many_text(MOST_CONTAINERS))
            if on_part is not None:
                on_part(len(parts[-1]))
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


def too_many_text(most: int) -> str:
    return f"the request body has more than {most} objects and lists"


def check_containers(body: bytes, most: int = MOST_CONTAINERS) -> None:
    """TooLarge if the JSON text has too many objects and lists. Brackets within strings do not count, unless the body
    is so large that to tell them apart would take long."""
    if len(body) < 2 * most or _brackets(body) <= most:
        return
    if _brackets(STRINGS.sub(b"", body) if len(body) <= LARGEST_READ else body) > most:
        raise TooLarge(too_many_text(most))


def _brackets(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")
