"""The fake engine for tests that have no event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from tests.rig.fake_engine.engine import FakeEngine


@contextlib.contextmanager
def fake_engine(engine: FakeEngine | None = None) -> Iterator[FakeEngine]:
    """Serve an engine (a plain one unless given) from a thread of its own."""
    engine = engine or FakeEngine()
    started: Future[asyncio.AbstractEventLoop] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        async with engine:
            started.set_result(asyncio.get_running_loop())
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="fake-engine", daemon=True)
    thread.start()
    loop = started.result()
    try:
        yield engine
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
