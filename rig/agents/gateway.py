"""A gateway process for real agents, with a pool of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.pool.actors import start_pool

from rig.agents.engine import CONTEXT, TaskEngine
from rig.chatml import render_chat
from rig.gateways import gateway_process
from rig.ray_cluster import RayCluster
from rig.vocabulary import encode, pieces
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.steps.step import Step

CONTROL_KEY = "the-key-of-whoever-runs-the-agents"


@dataclass(frozen=True, slots=True)
class AgentsGateway:
    url: str
    pool: DataPool
    engine: TaskEngine

    def prompts(self) -> list[list[int]]:
        """What the engine was asked to go on from, call by call."""
        calls = [seen.body for seen in self.engine.requests if seen.path == "/v1/chat/completions"]
        return [_prompt(call) for call in calls]


@contextmanager
def agents_gateway(
    ray_cluster: RayCluster, engine: TaskEngine, model: Path, log: Path, *, bridge: str = "off"
) -> Iterator[AgentsGateway]:
    with ray_cluster.namespace() as namespace:
        start_pool(PoolPlan(), namespace)
        with gateway_process(
            log,
            env={"STEPWELL_GATEWAY_CONTROL_KEYS": CONTROL_KEY},
            data_pool_name="data_pool",
            vllm_addresses=engine.url,
            tokenizer_path=model,
            ray_address=ray_cluster.address,
            ray_namespace=namespace,
            prompt_length=CONTEXT,
            response_length=1024,
            bridge=bridge,
        ) as gateway:
            yield AgentsGateway(gateway.url, DataPool(PoolClient("data_pool", namespace)), engine)


def reply_text(step: Step) -> str:
    return "".join(pieces(step.response_ids.tolist()))


def _prompt(call: dict[str, Any]) -> list[int]:
    given = (call.get("kv_transfer_params") or {}).get("prompt_token_ids")
    return given or encode(render_chat(call["messages"], call.get("tools") or []))
