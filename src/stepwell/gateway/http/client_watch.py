"""Tells when a client leaves before the end of its answer."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from stepwell.common.bounded_http import WHEN_GONE
from stepwell.gateway.http.request_body import Message, Receive


class Client(NamedTuple):
    """Who waits for an answer, once the request is read."""

    scope: Message
    receive: Receive


def watch_client(client: Client, on_gone: Callable[[], object]) -> Callable[[], object]:
    """Call `on_gone` if the client leaves. The function that is returned ends the watching.

    The gateway's own HTTP connections tell it. Under another server, a task waits for it, which costs each call more.
    """
    when_gone = (client.scope.get("extensions") or {}).get(WHEN_GONE)
    if when_gone is None:
        return asyncio.create_task(_wait(client.receive, on_gone)).cancel
    stop_watching: Callable[[], object] = when_gone(on_gone)
    return stop_watching


async def _wait(receive: Receive, on_gone: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
