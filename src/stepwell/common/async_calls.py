"""Calls from an event loop.

- A function that may block runs in a thread; work that a cancellation must not cut is run to its end.
- A call that fails for a passing reason is made again after a pause, if it is safe to repeat.
- Many callers cost few calls: one call for all who wait (Coalescer), one answer for all who ask (SharedAnswer), one
  message for many items (BatchSender).
"""

import asyncio
import contextlib
import inspect
import logging
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from stepwell.errors import PoolUnavailable

log = logging.getLogger("stepwell")

T = TypeVar("T")
RepeatedWork: TypeAlias = Callable[[], Awaitable[float]]
"""One round of work; returns the seconds to wait before the next round."""
E = TypeVar("E", bound=Exception)
R = TypeVar("R")

MIN_AGE, MAX_AGE = 1.0, 10.0
LARGEST_SHARE = 0.002


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


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts, in seconds."""

    first: float
    longest: float
    """The pause doubles after every attempt up to this."""
    jitter: float = 0.0
    """The share by which a pause varies at random, so that many callers do not return at once."""

    def pauses(self) -> Iterator[float]:
        pause = self.first
        while True:
            yield pause * random.uniform(1 - self.jitter, 1 + self.jitter)
            pause = min(2 * pause, self.longest)


async def retry_while_unavailable(
    call: Callable[[], Awaitable[T]],
    unavailable: type[E] | tuple[type[E], ...],
    backoff: Backoff,
    *,
    attempts: int | None = None,
    seconds: float | None = None,
    before_pause: Callable[[E, float], float] | None = None,
) -> T:
    """Make the call until it answers, fails in another way, or the attempts or seconds are used up.

    `before_pause` sees the failure and the planned pause, and returns the pause to make.
    """
    loop = asyncio.get_running_loop()
    deadline = None if seconds is None else loop.time() + seconds
    for attempt, pause in enumerate(backoff.pauses(), 1):
        try:
            return await call()
        except unavailable as failure:
            is_last = attempt == attempts or (deadline is not None and loop.time() + pause > deadline)
            if is_last:
                raise
            wait = pause if before_pause is None else before_pause(failure, pause)
        await asyncio.sleep(wait)
    raise AssertionError("the pauses of a Backoff have no end")


class Coalescer:
    """Makes a call at most once at a time, and at most once in `every` seconds, for any number of callers.

    A caller of `fresh` gets a call that starts afterwards; callers that come while one runs share the next. The call
    stores its result where the callers look for it. It must not fail.
    """

    def __init__(self, call: Callable[[], Awaitable[None]], *, every: float = 0.0) -> None:
        self._call = call
        self._every = every
        self._next: asyncio.Event | None = None
        self._calling: asyncio.Task[None] | None = None
        self._called_at = 0.0

    async def fresh(self) -> None:
        if self._next is None:
            self._next = asyncio.Event()
        if self._calling is None:
            self._calling = asyncio.create_task(self._serve())
        await self._next.wait()

    def close(self) -> None:
        """Release all callers that wait."""
        if self._calling is not None:
            self._calling.cancel()
        self._release(self._next)

    async def _serve(self) -> None:
        served = self._next
        try:
            while self._next is not None:
                await asyncio.sleep(self._called_at + self._every - time.monotonic())
                served, self._next = self._next, None
                self._called_at = time.monotonic()
                await self._call()
                served.set()
        finally:
            self._calling = None
            self._release(served)
            self._release(self._next)

    def _release(self, waiting: asyncio.Event | None) -> None:
        if waiting is not None:
            waiting.set()


class SharedAnswer(Generic[T]):
    """The pool's answer to one question. Any number of callers cost the pool as much as one caller.

    An answer is reused for so long that the question takes no more than LARGEST_SHARE of the pool's time, between
    MIN_AGE and MAX_AGE seconds.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], *, timeout: float = 2.0) -> None:
        self._ask = ask
        self._timeout = timeout
        self._asking: asyncio.Task[T] | None = None
        self._asked_at = 0.0
        self._valid_until = 0.0

    async def get(self, *, fresh: bool = False) -> T:
        """The answer; with `fresh`, one to a question that is asked from now on.

        PoolUnavailable if the pool does not answer in time. The question stays open and serves the next caller.
        """
        since = time.monotonic() if fresh else 0.0
        while True:
            asking = self._current_question(since)
            asked_at = self._asked_at
            left = max(0.05, asked_at + self._timeout - time.monotonic())
            done, _ = await asyncio.wait({asking}, timeout=left)
            if not done:
                raise PoolUnavailable(f"the pool has not answered for {time.monotonic() - asked_at:.0f} s")
            if asked_at >= since:
                return asking.result()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _current_question(self, since: float) -> asyncio.Task[T]:
        """The open question, the last one if its answer is still valid, or a new one."""
        now = time.monotonic()
        if self._asking is None or (self._asking.done() and (now >= self._valid_until or self._asked_at < since)):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask_and_time())
            self._asking.add_done_callback(ignore_failure)
        return self._asking

    async def _ask_and_time(self) -> T:
        try:
            answer = await self._ask()
        except PoolUnavailable:
            self._valid_until = time.monotonic() + MIN_AGE
            raise
        now = time.monotonic()
        self._valid_until = now + min(MAX_AGE, max(MIN_AGE, (now - self._asked_at) / LARGEST_SHARE))
        return answer


class BatchSender(Generic[T, R]):
    """Sends items in shared messages, because a message costs more than an item.

    - One message is under way at a time. It holds all items that came while the last one was under way: a single item
      waits for nothing, and under load the messages grow instead of their number.
    - Each item gets its own answer or exception. If the message fails, every item of it gets that exception.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Awaitable[Sequence[R | Exception]]],
        *,
        before_send: Callable[[], Awaitable[None]] | None = None,
        pause: float = 0.0,
        weigh: Callable[[T], int] = lambda _: 1,
        max_weight: int = sys.maxsize,
        sends_cancelled: bool = False,
        patience: Callable[[T], float] = lambda _: 0.0,
    ) -> None:
        """`before_send` is awaited before each message, so that more items can come; `pause` is the time in seconds
        between two messages. A message weighs at most `max_weight`, unless a single item weighs more.

        `patience`: the seconds that an item waits for others before it leaves, until `hurry` is called.

        An item whose caller was cancelled before its message left is dropped, unless `sends_cancelled`.
        """
        self._send = send
        self._before_send = before_send
        self._pause = pause
        self._weigh = weigh
        self._max_weight = max_weight
        self._sends_cancelled = sends_cancelled
        self._patience = patience
        self._hurried = asyncio.Event()
        """Something is in the queue that does not wait."""
        self._queue: list[tuple[T, asyncio.Future[R]]] = []
        """The items, and their answers."""
        self._sending: asyncio.Task[None] | None = None

    async def submit(self, item: T) -> R:
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._queue.append((item, answer))
        if not self._patience(item):
            self._hurried.set()
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return await answer

    def hurry(self) -> None:
        """Sends the content of the queue now."""
        self._hurried.set()

    async def _send_all(self) -> None:
        try:
            while True:
                if not self._hurried.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._patience(self._queue[0][0])):
                            await self._hurried.wait()
                self._hurried.clear()
                if self._before_send is not None:
                    await self._before_send()
                if message := self._next_message():
                    await self._exchange(message)
                if not self._queue:
                    return
                if self._pause:
                    await asyncio.sleep(self._pause)
        finally:
            self._sending = None

    def _next_message(self) -> list[tuple[T, asyncio.Future[R]]]:
        if not self._sends_cancelled:
            self._queue = [(item, answer) for item, answer in self._queue if not answer.done()]
        weight = count = 0
        for item, _ in self._queue:
            weight += self._weigh(item)
            if count and weight > self._max_weight:
                break
            count += 1
        message, self._queue = self._queue[:count], self._queue[count:]
        return message

    async def _exchange(self, message: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        results: Sequence[R | Exception]
        try:
            results = await self._send([item for item, _ in message])
        except Exception as failure:  # noqa: BLE001 - each caller gets it
            results = [failure] * len(message)
        for (_, answer), result in zip(message, results, strict=True):
            if answer.done():
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
