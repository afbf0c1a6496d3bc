"""The process of the demo's agents (episodes.py, live/live_service.py), from both sides.

It has a gateway as its child and follows the lines on its stdin. It answers each line with a number when the order is
done. It ends at the end of stdin, so it does not outlive the process that started it.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from stepwell.agents.gateway_process import GatewayProcess
from stepwell.common.processes import last_lines
from stepwell.demo.model import CONTEXT
from stepwell.errors import NotReady

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CALL_TIMEOUT = 60.0
"""Seconds for a call on a busy machine."""
STOP_TIMEOUT = 45.0
"""Seconds: a gateway takes up to 40 to deliver its last steps."""
SHOWN = 10
"""Lines of the log in an error text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the process of the agents works with; the argument of its command line."""

    task: str
    seed: int
    engine: str
    """Address of the engine."""
    tokenizer: str
    """Folder of the model."""
    data_pool_name: str
    ray_address: str
    ray_namespace: str
    concurrency: int = 64
    turns: str = ""
    """The file for what the users of the live task see."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class AgentProcess:
    """It runs while the block of `start_agents` is open."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log

    def wait(self) -> None:
        """Waits until the gateway is ready."""
        self._answer()

    def evaluate(self) -> float:
        """The mean reward on held-out samples, with the engine's current weights."""
        return float(self.tell("evaluate"))

    def train(self) -> None:
        """Starts rollouts."""
        self.tell("train")

    def stop(self) -> None:
        self.tell("stop")

    def tell(self, order: str) -> float:
        """Returns the answer, which comes when the order is done."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{order}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NotReady(f"the agents' process ended; {last_lines(self._log, SHOWN)}")
        return float(line)


@contextmanager
def start_agents(orders: Orders, *, log: Path, module: str = "stepwell.demo.agent_process") -> Iterator[AgentProcess]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", module, orders.to_json()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the trainer, which then closes stdin
        )
    try:
        yield AgentProcess(process, log)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        process.communicate(timeout=STOP_TIMEOUT)  # the process ends at the end of its stdin
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


# -- in that process ---------------------------------------------------------------------------------------------------


class Follower(Protocol):
    async def do(self, order: str) -> float: ...

    async def stop(self) -> None:
        """Ends what it has begun."""


async def follow(orders: Orders, make: Callable[[str], Follower]) -> None:
    """`make` gets the gateway's address."""
    gateway = GatewayProcess(
        data_pool_name=orders.data_pool_name,
        vllm_addresses=orders.engine,
        tokenizer_path=orders.tokenizer,
        prompt_length=CONTEXT,
        response_length=CONTEXT,
        ray_address=orders.ray_address,
        ray_namespace=orders.ray_namespace,
    )
    async with gateway:
        follower = make(gateway.url)
        _say(0.0)
        while order := await asyncio.to_thread(sys.stdin.readline):
            _say(await follower.do(order.strip()))
        await follower.stop()


def sdk_client(url: str) -> "AsyncOpenAI":
    """A call that fails is not repeated: the demo counts it."""
    from openai import AsyncOpenAI, DefaultAioHttpClient

    return AsyncOpenAI(
        base_url=url, api_key="-", timeout=CALL_TIMEOUT, max_retries=0, http_client=DefaultAioHttpClient()
    )


def _say(number: float) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()
