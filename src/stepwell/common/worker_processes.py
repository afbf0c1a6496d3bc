"""Several processes of one server: started together, started again one by one, and ended together.

- A worker that ends is started again, each time after a longer pause unless it was up for a while.
- A worker whose first process cannot start ends all.
- SIGTERM and SIGINT end all; each has time to finish.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from stepwell.common.processes import FIRST_PAUSE, GRACE, LONGEST_PAUSE, STABLE_AFTER, exit_text
from stepwell.errors import NotReady

log = logging.getLogger("stepwell")

CANNOT_START = 3
"""The exit code of a worker that has told why it cannot start."""
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WorkerProcesses:
    def __init__(self, count: int, make: Callable[[int], BaseProcess]) -> None:
        """`make` gives a process for the worker of that number, not started yet."""
        self._count = count
        self._make = make
        self._running: dict[int, BaseProcess] = {}
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Runs until a signal ends it. NotReady if a worker cannot start."""
        loop = asyncio.get_running_loop()
        for number in END_SIGNALS:
            loop.add_signal_handler(number, self._ending.set)
        keeping = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait([ending, *keeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ending, *keeping):
                task.cancel()
            outcomes = await asyncio.gather(*keeping, return_exceptions=True)
            await asyncio.gather(*map(_end, self._running.values()))
        for outcome in outcomes:
            if isinstance(outcome, NotReady):
                raise outcome

    async def _keep(self, number: int) -> None:
        pause, is_first = FIRST_PAUSE, True
        while True:
            process = self._running[number] = self._make(number)
            process.start()
            started = time.monotonic()
            code = await _exit_code(process)
            if code == CANNOT_START and is_first:
                raise NotReady(f"worker {number} cannot start; its own line says why")
            is_first = False
            pause = FIRST_PAUSE if time.monotonic() - started > STABLE_AFTER else pause
            log.warning("worker %d ended with %s; starting it again in %g s", number, exit_text(code), pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


async def _exit_code(process: BaseProcess) -> int:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()
    return process.exitcode or 0


async def _end(process: BaseProcess) -> None:
    if process.exitcode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(GRACE):
            await _exit_code(process)
    except TimeoutError:
        log.warning("a worker did not end within %g s and is killed", GRACE)
        process.kill()
        await _exit_code(process)
