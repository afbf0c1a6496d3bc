"""The child's side of agents/foreign: it lists its tasks, then runs what it is asked for, until stdin ends.

Only the standard library, because it runs in the Python of a framework.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Protocol

LONGEST_LINE = 2**24
INFRASTRUCTURE = "infrastructure"
"""A failure that says nothing about the policy. The others are names of Stepwell's AgentFailure."""


class TaskRunner(Protocol):
    names: Sequence[str]
    """The names of the tasks."""

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Open while tasks run."""

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One rollout of the task `asked["task"]`, with the model at `asked["base_url"]`: {reward}, or
        {failure, why}."""


def failed(failure: str, why: str) -> dict[str, Any]:
    return {"failure": failure, "why": why[:500]}


def require(package: str) -> None:
    """Ends this program with a sentence if the framework is not installed in this Python."""
    if find_spec(package) is None:
        raise SystemExit(
            f"{package} is not installed in {sys.executable}: install it there ({sys.executable} -m pip install "
            f"{package}), or name the Python that has it with --python"
        )


def take_stdout() -> BinaryIO:
    """The answers go there. What a framework prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def read_config(path: str) -> dict[str, Any]:
    """The framework's own settings; none if the path is empty."""
    return dict(json.loads(Path(path).read_text())) if path else {}


async def serve(runner: TaskRunner, answers: BinaryIO) -> None:
    async with runner.serving():
        _tell(answers, {"tasks": list(runner.names)})
        running: dict[int, asyncio.Task[None]] = {}
        lines = await _lines_of_stdin()
        while line := await lines.readline():
            asked = json.loads(line)
            if asked.get("cancel"):
                if (task := running.get(asked["id"])) is not None:
                    task.cancel()
                continue
            running[asked["id"]] = task = asyncio.create_task(_answer(runner, answers, asked))
            task.add_done_callback(lambda _, number=asked["id"]: running.pop(number, None))  # type: ignore[misc]
        for task in list(running.values()):
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _answer(runner: TaskRunner, answers: BinaryIO, asked: dict[str, Any]) -> None:
    try:
        told = await runner.run(asked)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the parent waits for an answer
        told = failed(INFRASTRUCTURE, f"{type(failure).__name__}: {failure}")
    _tell(answers, {"id": asked["id"], **told})


async def _lines_of_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _tell(answers: BinaryIO, told: dict[str, Any]) -> None:
    answers.write(json.dumps(told).encode() + b"\n")
    answers.flush()
