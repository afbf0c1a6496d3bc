"""Masks steps before they are stored, with a user's function in a process of its own.

- The function cannot hold up the gateway: it has a time limit, and a process that exceeds it is killed and started
  again. A thread would not do, because a regular expression holds Python's lock until it is done.
- A step over which the function fails is not stored.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from stepwell.common.child import FramedChild
from stepwell.common.processes import dying_with_this_process
from stepwell.errors import NotReady
from stepwell.gateway.recording.redaction import RedactionFound, RedactionJob, mask_step, packed, task_of, unpacked
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

REDACTION_FAILED = "redaction_failed"
"""The cause under which steps are counted as lost."""
REDACT_TIMEOUT = 5.0
"""Seconds for the steps of one call, with the time that they wait for those of other calls."""
START_TIMEOUT = 120.0
RESTART_PAUSE = 1.0
COMMAND = (sys.executable, "-m", "stepwell.gateway.recording.redaction")


class RedactionFailed(Exception):
    """The steps must not be stored; the text says why, and has nothing of theirs."""


class Redactor:
    """`run` keeps the process running; it belongs to one event loop."""

    def __init__(
        self,
        function: str,
        tokenizer_path: str,
        *,
        timeout: float = REDACT_TIMEOUT,
        restart_pause: float = RESTART_PAUSE,
    ) -> None:
        self._job = RedactionJob(function, tokenizer_path)
        self._timeout = timeout
        self._restart_pause = restart_pause
        self._why: str | None = f"{function} is still loading"
        self._child: RedactionProcess | None = None
        self._ready = asyncio.Event()
        self._turn = asyncio.Lock()
        """The process does one thing at a time."""

    def why_not_ready(self) -> str | None:
        return self._why

    async def redact(self, steps: Sequence[Step]) -> list[Step]:
        """The steps as they may be stored. RedactionFailed if the function fails or is not done in time."""
        tasks, loading = [task_of(step) for step in steps], self._why
        try:
            async with asyncio.timeout(self._timeout):
                await self._ready.wait()
                async with self._turn:
                    mask, answer = await self._ask(tasks)
        except TimeoutError:
            raise RedactionFailed(loading or f"{self._job.function} took more than {self._timeout:g} s") from None
        if isinstance(answer, str):
            raise RedactionFailed(f"{self._job.function} failed with {answer}")
        found = [RedactionFound(*each) for each in answer]
        return [mask_step(step, masked, mask) for step, masked in zip(steps, found, strict=True)]

    async def run(self) -> None:
        """Keep the process running, until cancelled."""
        while True:
            child = None
            try:
                # What the function prints is not kept: it may have what must not be stored.
                child = RedactionProcess(await FramedChild.start(dying_with_this_process(COMMAND)))
                await child.greet(self._job)
                self._child, self._why = child, None
                self._ready.set()
                await child.wait()
                log.warning("the process of %s ended; it is started again", self._job.function)
                self._stop_using()
            except (OSError, EOFError, TimeoutError, NotReady) as failure:
                self._why = str(failure) or f"{self._job.function} was not loaded"
                log.error("no step is stored, because the redaction function does not run: %s", self._why)
            finally:
                self._ready.clear()
                if child is not None:
                    await child.close()
            await asyncio.sleep(self._restart_pause)

    async def _ask(self, tasks: object) -> tuple[int, Any]:
        """A process whose answer nobody read is of no use any more."""
        if (child := self._child) is None:
            raise RedactionFailed(f"{self._job.function} is not running")
        try:
            return child.mask, await child.ask(tasks)
        except (OSError, EOFError):
            raise RedactionFailed(f"{self._job.function} ended its process") from None
        finally:
            if not child.is_idle:
                self._stop_using()
                child.kill()

    def _stop_using(self) -> None:
        self._ready.clear()
        self._child, self._why = None, f"{self._job.function} is started again"


class RedactionProcess:
    def __init__(self, child: FramedChild) -> None:
        self.mask = 0
        self.is_idle = True
        self.kill, self.wait, self.close = child.kill, child.wait, child.close
        self._child = child

    async def greet(self, job: RedactionJob) -> None:
        """NotReady says why the function cannot be loaded."""
        async with asyncio.timeout(START_TIMEOUT):
            told = await self.ask(job)
        if isinstance(told, str):
            raise NotReady(told)
        self.mask = told

    async def ask(self, message: object) -> Any:
        self.is_idle = False
        await self._child.send(packed(message))
        answer = unpacked(await self._child.receive())
        self.is_idle = True
        return answer
