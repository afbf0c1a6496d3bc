"""An asynchronous server for tests that have no event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def in_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Keep `server` open in an event loop of its own, in a thread of its own."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, T]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with server as opened:
            started.set_result((asyncio.get_running_loop(), stop, opened))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    loop, stop, opened = started.result()
    try:
        yield opened
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
