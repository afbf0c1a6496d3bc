"""A program that lives many times. Each life is a fork of a process that has imported everything and done nothing else,
so that a life begins at once; it is killed as the kernel would do it, with SIGKILL, at a random moment."""

import faulthandler
import math
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count

Live = Callable[[Callable[[], None]], None]
"""What a life does. It calls its argument at every pass through the model."""

NEXT_PASS = 300.0
"""Seconds within which a life must come to its next pass; on a busy machine it takes a minute to connect to Ray."""
STUCK = 120.0
"""Seconds after which a life writes down where it is."""
MOST_PASSES = 2
"""A life is killed after at most so many, or during the next one."""


def passes_for(kills: int) -> int:
    """A program with so many passes does not come to its end before its last kill."""
    return kills * (MOST_PASSES + 1) + 1


class Lives:
    """Equal seeds kill at equal moments, as far as two processes can be equal. However late a kill comes, its life
    begins at most one pass more than it should: before the next one it waits for the kill."""

    def __init__(self, live: Live, seed: int) -> None:
        self._live = live
        self._chance = random.Random(seed)
        self._between_passes = 0.2
        """Seconds, as last seen."""
        self.moments: list[str] = []
        """When each life was killed."""

    def kill(self, times: int) -> None:
        for _ in range(times):
            passes, part = self._chance.randint(0, MOST_PASSES), self._chance.uniform(0.0, 1.2)
            pid, told = self._begin(passes + 1)
            try:
                self._await_passes(told, passes)
                time.sleep(part * self._between_passes)
            finally:
                os.kill(pid, signal.SIGKILL)
                os.close(told)
            _, status = os.waitpid(pid, 0)
            self.moments.append(f"{passes} passes and {part * self._between_passes:.3f} s")
            code = os.waitstatus_to_exitcode(status)
            assert code == -signal.SIGKILL, f"a life ended by itself with {code}, before {self.moments[-1]}"

    def run(self) -> int:
        """A life that nobody ends; its exit code."""
        pid, told = self._begin()
        while os.read(told, 4096):
            pass
        os.close(told)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _begin(self, most_passes: float = math.inf) -> tuple[int, int]:
        told, telling = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        faulthandler.cancel_dump_traceback_later()  # pytest's; a fork that has inherited it waits for ever
        if pid := os.fork():
            os.close(telling)
            return pid, told
        os.close(told)
        faulthandler.dump_traceback_later(STUCK)
        code, numbers = 1, count(1)

        def passes() -> None:
            if next(numbers) > most_passes:
                signal.pause()
            os.write(telling, b".")

        try:
            self._live(passes)
            code = 0
        except BaseException:  # noqa: BLE001 - the fork must not return into the program
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _await_passes(self, told: int, passes: int) -> None:
        before = None
        for _ in range(passes):
            readable, _, _ = select.select([told], [], [], NEXT_PASS)
            assert readable, f"a life did not come to its next pass within {NEXT_PASS:g} s"
            if not os.read(told, 1):
                return  # it has ended
            if before is not None:
                self._between_passes = time.monotonic() - before
            before = time.monotonic()
