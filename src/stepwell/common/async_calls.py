"""Calls from an event loop: a function that may block, work that repeats, work that a cancellation must not cut."""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

log = logging.getLogger("stepwell")

T = TypeVar("T")
RepeatedWork: TypeAlias = Callable[[], Awaitable[float]]
"""One round of work; returns the seconds to wait before the next round."""


async def call(function: Callable[..., T] | Callable[..., Awaitable[T]], *args: object, **named: object) -> T:
    """Calls a plain function in a thread and a coroutine function in the loop. An awaitable result, for example of a
    lambda, is awaited."""
    if is_async(function):
        result = function(*args, **named)
    else:
        result = await in_thread(partial(function, *args, **named))
    return await result if inspect.isawaitable(result) else result


def is_async(function: object) -> bool:
    """Whether the argument is a coroutine function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def in_thread(function: Callable[[], T]) -> T:
    """Runs the function in its own daemon thread; the process does not wait for that thread when it ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(done.set_result, function())
        except StopIteration:
            settle = partial(done.set_exception, RuntimeError("StopIteration"))  # a future refuses StopIteration
        except BaseException as failure:  # noqa: BLE001 - it is raised again where the result is awaited
            settle = partial(done.set_exception, failure)
        with suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(lambda: None if done.cancelled() else settle())

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await done


def ignore_failure(work: asyncio.Future[Any]) -> None:
    """A done callback for work that perhaps nobody waits for any more: asyncio prints no failure of it."""
    if not work.cancelled():
        work.exception()


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work until it is done, even if the caller is cancelled meanwhile; then the cancellation goes on."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


@asynccontextmanager
async def running(*works: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """The works run beside the block. They are cancelled when the block is left."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def repeating(*works: RepeatedWork, pause_after_failure: float = 5.0) -> AbstractAsyncContextManager[None]:
    """Each work repeats beside the block, until the block is left."""
    return running(*(_repeat(work, pause_after_failure) for work in works))


async def _repeat(work: RepeatedWork, pause_after_failure: float) -> None:
    """The work handles the failures that it expects. Any other is logged and does not end the repetition."""
    while True:
        try:
            pause = await work()
        except Exception:
            log.exception("%s failed and is repeated", getattr(work, "__qualname__", work))
            pause = pause_after_failure
        await asyncio.sleep(pause)
