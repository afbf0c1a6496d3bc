"""Which of many concurrent calls is running at this moment: a coroutine that says so whenever it is resumed."""

import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from stepwell.rewards.sandbox.running_call import NOBODY, Cell

T = TypeVar("T")


@types.coroutine
def marked(call: Coroutine[Any, Any, T], number: int, cell: Cell) -> Generator[Any, Any, T]:
    """Runs `call`, with its number in the cell while it holds the event loop and not while it waits."""
    resume, value = call.send, None
    while True:
        cell.write(number)
        try:
            awaited = resume(value)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            cell.write(NOBODY)
        try:
            resume, value = call.send, (yield awaited)
        except BaseException as thrown:  # noqa: BLE001 - handed on to the call
            resume, value = call.throw, thrown
