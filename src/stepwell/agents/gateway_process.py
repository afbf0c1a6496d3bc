"""A gateway as a child of this process: started, listened to, restarted when it dies, ended at the end.

    async with GatewayProcess(data_pool_name="data_pool", vllm_addresses="http://127.0.0.1:8001", …) as gateway:
        flow = BlackBoxAgentFlow(gateway.url, agent)

What always holds: its output is read as it comes, so that it can never hang on a full pipe; it keeps its address over
restarts, so that base_urls stay good; on Linux it does not outlive this process, however that ends. A gateway that dies
before it was ready is an error that says what it said; one that dies later is started again, each time after a longer
pause unless it had been up for a while.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from types import TracebackType
from typing import Self

import orjson

from stepwell.agents.child import Child, Tail, how_it_ended
from stepwell.agents.link import GatewayLink
from stepwell.errors import NotReady

log = logging.getLogger("stepwell.agents.gateway")

POLL = 0.1
LINES_KEPT = 20
SAY_AGAIN = 10.0
"""Seconds between two lines that say what is waited for; what the gateway itself says is passed on at once."""
GRACE = 40.0
"""Seconds a gateway gets to deliver its last steps; it takes 30 itself."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
LONG_ENOUGH = 60.0
"""Seconds after which a gateway that was up is no longer thought to be failing."""


class GatewayProcess:
    """Used inside `async with`."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        key: str | None = None,
        ready_timeout: float = 300.0,
        **flags: object,
    ) -> None:
        """`flags` are those of `stepwell gateway`, with underscores; `key` becomes its control key, out of sight of
        whoever lists processes. Without a port, a free one is taken."""
        self.key = key
        self.restarts = 0
        self._port = port or _free_port(host)
        self.url = f"http://{host}:{self._port}"
        self._command = [sys.executable, "-m", "stepwell.gateway", *_arguments(host=host, port=self._port, **flags)]
        self._ready_timeout = ready_timeout
        self._said = Tail(LINES_KEPT)
        self._child: Child | None = None
        self._keeping_up: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def __aenter__(self) -> Self:
        child = self._start()
        try:
            await self._wait_until_ready(child)
        except BaseException:
            await child.close()
            raise
        self._keeping_up = asyncio.create_task(self._keep_up())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeping_up is not None
        self._keeping_up.cancel()
        await asyncio.wait([self._keeping_up])
        assert self._child is not None
        await _end(self._child)

    def _start(self) -> Child:
        tethered = [sys.executable, "-m", "stepwell.agents.tether", str(os.getpid()), *self._command]
        env = {"STEPWELL_LOG": "json"} | ({"STEPWELL_GATEWAY_CONTROL_KEYS": self.key} if self.key else {})
        self._child = Child(tethered, env=env, hear=self._hear, hear_errors=self._hear)
        return self._child

    def _hear(self, line: str) -> None:
        level, text = _read_log_line(line)
        self._said.add(text)
        log.log(level, "gateway: %s", text)

    async def _wait_until_ready(self, child: Child) -> None:
        said_at = time.monotonic()
        deadline = said_at + self._ready_timeout
        async with GatewayLink(self.url, self.key) as link:
            while (why := await link.why_not_ready()) is not None:
                now = time.monotonic()
                if child.has_ended:
                    raise NotReady(f"the gateway ended with {how_it_ended(await child.wait())}:\n{self._said}")
                if now > deadline:
                    raise NotReady(f"the gateway is not ready after {self._ready_timeout:g} s: {why}")
                if now > said_at + SAY_AGAIN:
                    log.warning("still waiting for the gateway at %s: %s", self.url, why)
                    said_at = now
                await asyncio.sleep(POLL)
        log.info("the gateway at %s is ready", self.url)

    async def _keep_up(self) -> None:
        pause = FIRST_PAUSE
        while True:
            assert self._child is not None
            started = time.monotonic()
            how = how_it_ended(await self._child.wait())
            pause = FIRST_PAUSE if time.monotonic() - started > LONG_ENOUGH else pause
            log.warning("the gateway ended with %s; starting it again in %g s", how, pause)
            await self._child.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.restarts += 1
            self._start()


async def _end(child: Child) -> None:
    """In its own time, so that it can deliver its last steps, but not without end."""
    try:
        child.terminate()
        async with asyncio.timeout(GRACE):
            await child.wait()
    except TimeoutError:
        log.warning("the gateway did not end within %g s and is killed", GRACE)
    finally:
        await child.close()


def _arguments(**flags: object) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def _read_log_line(line: str) -> tuple[int, str]:
    """Its level and its text; what is no log line is passed on as it is."""
    try:
        record = orjson.loads(line)
        level = logging.getLevelNamesMapping()[record["level"]]
        return level, "\n".join(str(record[part]) for part in ("message", "exception") if part in record)
    except (ValueError, KeyError, TypeError):
        return logging.INFO, line
