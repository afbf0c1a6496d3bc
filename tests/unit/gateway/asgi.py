"""One request to an ASGI application, without a server."""

from collections.abc import Awaitable, Callable, Sequence

from stepwell.gateway.requests import Headers, Message, Receive, Send

App = Callable[[Message, Receive, Send], Awaitable[None]]


async def exchange(app: App, method: str, path: str, headers: Headers, parts: Sequence[bytes]) -> list[Message]:
    """What it sends; the body comes in `parts`."""
    sent: list[Message] = []
    coming = list(parts)

    async def receive() -> Message:
        body = coming.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(coming)}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "headers": headers, "server": ("gateway", 80)}
    await app(scope, receive, send)
    return sent
