"""The process that `agent_process` starts: it has a gateway as its child and follows the lines on its stdin.

It answers each line with a number when the order is done. It ends at the end of stdin, so it does not outlive the
process that started it.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from stepwell.agents.gateway_process import GatewayProcess
from stepwell.demo.agent_process import Orders
from stepwell.demo.vocabulary import CONTEXT

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CALL_TIMEOUT = 60.0
"""Seconds for a call on a busy machine."""


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
