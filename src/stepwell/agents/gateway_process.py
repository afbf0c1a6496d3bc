"""A gateway as a child process: started, its log read, restarted when it dies, ended on exit.

    async with GatewayProcess(data_pool_name="data_pool", vllm_addresses="http://127.0.0.1:8001", …) as gateway:
        flow = BlackBoxAgentFlow(gateway.url, agent)

It keeps its address over restarts, so base_urls stay valid. The guarantees of SupervisedProcess hold.
"""

import logging
import sys
import time
from typing import Self

from stepwell.agents.gateway_client import GatewayClient
from stepwell.common.listening import free_port
from stepwell.common.processes import Program, SupervisedProcess

log = logging.getLogger("stepwell.agents.gateway")

WAITING_LOG_INTERVAL = 10.0
"""Seconds between two log lines about what the start waits for; the gateway's own lines are logged at once."""


class GatewayProcess(SupervisedProcess):
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
        """`flags` are those of `stepwell gateway`, with underscores. `key` becomes its control key; it is passed in the
        environment, so a list of processes does not show it. Without a port, a free one is used."""
        self.key = key
        port = port or free_port(host)
        self.url = f"{'https' if 'tls_cert' in flags else 'http'}://{host}:{port}"
        self._logged_at = time.monotonic()
        program = Program(
            name="gateway",
            command=[sys.executable, "-m", "stepwell.gateway", *_arguments(host=host, port=port, **flags)],
            why_not_ready=self._why_not_ready,
            env={"STEPWELL_LOG": "json"} | ({"STEPWELL_GATEWAY_CONTROL_KEYS": key} if key else {}),
        )
        super().__init__(program, on_line=_log_line, on_wait=self._still_waiting, ready_timeout=ready_timeout)

    async def __aenter__(self) -> Self:
        self._logged_at = time.monotonic()
        await super().__aenter__()
        log.info("the gateway at %s is ready", self.url)
        return self

    async def _why_not_ready(self) -> str | None:
        async with GatewayClient(self.url, self.key) as gateway:
            return await gateway.why_not_ready()

    def _still_waiting(self, why: str) -> None:
        if time.monotonic() > self._logged_at + WAITING_LOG_INTERVAL:
            log.warning("still waiting for the gateway at %s: %s", self.url, why)
            self._logged_at = time.monotonic()


def _arguments(**flags: object) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _log_line(level: int, text: str) -> None:
    log.log(level, "gateway: %s", text)
