"""Rollouts of environments of other frameworks, verifiers and Harbor, in a process with the framework's Python.

- `child/` has a program for each framework. It needs nothing of Stepwell; it is asked, and answers, in lines of JSON.
- The first line lists the tasks. Then each line to it asks for one rollout; many run in it at once.
- It has no key of this process: its environment is the basic variables and those that somebody named.
- If it dies, running rollouts fail by the infrastructure, and so does every later one.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import orjson

from stepwell.agents.outcome import AgentFailed, tells_machine_fault
from stepwell.agents.rollout import Rollout, Sample
from stepwell.common.processes import plain_environment
from stepwell.errors import BadRequest, NotReady

PROGRAMS: Mapping[str, str] = MappingProxyType({"verifiers": "verifiers_tasks.py", "harbor": "harbor_tasks.py"})
"""The program for each framework."""
CHILD = Path(__file__).parent / "child"
INFRASTRUCTURE = "infrastructure"
LONGEST_LINE = 2**24
START_TIMEOUT = 300.0
END_TIMEOUT = 30.0
"""Seconds that the process has to end its rollouts and itself."""


class TasksBroken(Exception):
    """A rollout failed for a reason that says nothing about the policy."""


class TasksProcess:
    """Used inside `async with`. `run` is an agent for BlackBoxAgentFlow, `samples` are its dataset."""

    def __init__(
        self,
        framework: str,
        tasks: str,
        *,
        python: str = sys.executable,
        config: Path | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        """`tasks`: as the framework names them, a taskset's id or a folder; `config`: its own settings, as JSON;
        `variables`: names of what it gets of this process' environment besides the basic ones."""
        if missing := [name for name in variables if name not in os.environ]:
            raise BadRequest(f"{', '.join(missing)} is not set: set it, or leave it out of --variables")
        if config is not None and not config.is_file():
            raise BadRequest(f"there is no file {config}")
        settings = [] if config is None else [str(config)]
        self.samples: list[Sample] = []
        self._framework = framework
        self._command = [python, str(CHILD / PROGRAMS[framework]), tasks, *settings]
        self._variables = variables
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_over = False

    async def __aenter__(self) -> Self:
        env = plain_environment() | {name: os.environ[name] for name in self._variables}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=env,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
        except OSError as failure:
            raise BadRequest(f"{self._command[0]} cannot be started: {failure}") from None
        try:
            async with asyncio.timeout(START_TIMEOUT):
                told = await self._read_line()
        except TimeoutError:
            told = None
        if told is None:
            await self._end()
            raise NotReady(f"the tasks of {self._framework} could not be loaded; the lines above say why")
        self.samples = [
            {"framework": self._framework, "task": place, "name": n} for place, n in enumerate(told["tasks"])
        ]
        self._reading = asyncio.create_task(self._read_answers())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def run(self, rollout: Rollout) -> float | None:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(
                {
                    "id": number,
                    "task": rollout.sample["task"],
                    "base_url": rollout.base_url,
                    "api_key": rollout.api_key,
                    "model": await rollout.model(),
                }
            )
            told = await answer
        except asyncio.CancelledError:
            with suppress(TasksBroken):
                self._send({"id": number, "cancel": True})
            raise
        finally:
            del self._answers[number]
        return reward_of(told)

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._is_over:
            raise TasksBroken(f"the process of {self._framework} has ended")
        self._process.stdin.write(orjson.dumps(line) + b"\n")

    async def _read_line(self) -> dict[str, Any] | None:
        """None at its end."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return dict(orjson.loads(line)) if line else None

    async def _read_answers(self) -> None:
        try:
            while (told := await self._read_line()) is not None:
                answer = self._answers.get(told["id"])
                if answer is not None and not answer.done():
                    answer.set_result(told)
        finally:
            self._is_over = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(TasksBroken(f"the process of {self._framework} has ended"))

    async def _end(self) -> None:
        """Closes its stdin, so that it ends; else it is killed, with all that it started."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT):
                await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._reading is not None:
            await self._reading


def reward_of(told: Mapping[str, Any]) -> float | None:
    """AgentFailed if the policy failed, TasksBroken if something else did. A framework may wrap a fault of the machine
    in an error of its own."""
    if "failure" not in told:
        return None if told["reward"] is None else float(told["reward"])
    if told["failure"] == INFRASTRUCTURE or (told["failure"] == "error" and tells_machine_fault(told["why"])):
        raise TasksBroken(told["why"])
    raise AgentFailed(told["failure"], told["why"])
