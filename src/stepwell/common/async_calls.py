"""Someone else's function, sync or async, called without holding up the event loop."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def call(function: Callable[..., T] | Callable[..., Awaitable[T]], *args: object, **named: object) -> T:
    """A plain function is called in a thread; what it gives is awaited where that is possible, as with a lambda."""
    if is_async(function):
        given = function(*args, **named)
    else:
        given = await in_thread(partial(function, *args, **named))
    return await given if inspect.isawaitable(given) else given


def is_async(function: object) -> bool:
    """Of a coroutine function, or of an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def in_thread(function: Callable[[], T]) -> T:
    """In a thread of its own, which this process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(_succeed, done, function())
        except BaseException as failure:  # noqa: BLE001 - it is raised again where the result is awaited
            settle = partial(_fail, done, failure)
        with suppress(RuntimeError):  # the loop may have ended before
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await done


def _succeed(done: asyncio.Future[T], given: T) -> None:
    if not done.cancelled():
        done.set_result(given)


def _fail(done: asyncio.Future[T], failure: BaseException) -> None:
    if not done.cancelled():  # a future refuses StopIteration
        done.set_exception(RuntimeError("StopIteration") if isinstance(failure, StopIteration) else failure)
