"""A gateway and a pool in front of an engine that says what a test scripts, and the shell of an example's user."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stepwell.gateway.dialects.request_rules import SamplingPolicy

from rig.agents import TaskEngine
from rig.agents.engine import CONTEXT
from rig.fake_engine import Reply
from rig.fake_engine.asking import Json
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.shells import Shell, fresh_shell
from rig.threads import in_thread
from stepwell.pool.client.batch import Batch
from tests.examples.folders import EXAMPLES

KEY = "the-control-key-of-the-gateway"
PATIENCE = 300.0
"""Seconds for one example: agents take long to start on a busy machine."""

Script = Callable[[list[Json]], Reply]
"""The reply to a conversation."""


class ScriptedEngine(TaskEngine):
    """Answers each call by its messages."""

    script: Script | None = None

    def reply_to(self, body: Json) -> Reply | None:
        return self.script(body["messages"]) if self.script else None


@dataclass(frozen=True)
class RunningStepwell:
    """A gateway with the settings of `stepwell up`, and what is behind it."""

    url: str
    engine: ScriptedEngine
    pool: LocalPool
    loop: asyncio.AbstractEventLoop

    def fetch(self, count: int, **terms: Any) -> Batch:
        """As a trainer does it."""
        fetched = self.pool.fetch_batch(count, timeout=60.0, **terms)
        return asyncio.run_coroutine_threadsafe(fetched, self.loop).result(90.0)


@dataclass(frozen=True)
class ExampleUser:
    """Types what a README says, in a folder with examples, where .stepwell/env has been read."""

    running: RunningStepwell
    shell: Shell

    def run(self, block: str, *, path: tuple[Path, ...] = (), **env: str) -> str:
        """What the commands print. `path` is searched for programs first."""
        searched = ":".join([*map(str, path), self.shell.env["PATH"]])
        shell = Shell(self.shell.folder, {**self.shell.env, **env, "PATH": searched})
        return shell.run("bash", "-ec", block, timeout=PATIENCE)


@asynccontextmanager
async def stepwell_served() -> AsyncIterator[RunningStepwell]:
    pool = LocalPool()
    async with (
        ScriptedEngine() as engine,
        serve_gateway(
            pool,
            [engine.url],
            control_keys=[KEY],
            prompt_length=CONTEXT,
            response_length=4096,
            sampling={"train": SamplingPolicy(on_policy=True, temperature=1.0)},
        ) as url,
    ):
        yield RunningStepwell(url, engine, pool, asyncio.get_running_loop())


@pytest.fixture(scope="module")
def running() -> Iterator[RunningStepwell]:
    with in_thread(stepwell_served()) as running:
        yield running


@pytest.fixture
def user(running: RunningStepwell, tmp_path: Path) -> Iterator[ExampleUser]:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    with fresh_shell(tmp_path, STEPWELL_URL=running.url, STEPWELL_KEY=KEY) as shell:
        yield ExampleUser(running, shell)
