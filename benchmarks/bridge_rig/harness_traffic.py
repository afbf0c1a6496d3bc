"""The steps of a rollout of a real harness, with the bridge or without.

The harness itself is run, unmodified, and not its recorded requests: what it sends back of a reply, and how, is what
the bridge depends on, and a recording of it would hold the prompts of other people's products. Gateway, bridge, pool
and flow are the real ones. A fake engine plays the model: it thinks before each reply, reads a file, edits it, runs a
command and answers. Or real vLLM with a tiny model does, which samples the same replies without the thinking.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from benchmarks.environments import installed_python
from benchmarks.exactness_rig.observed_vllm import ScriptingProxy, serve_proxy
from rig import chat_templates
from rig.agents import TaskEngine, installed
from rig.agents.engine import CONTEXT, NOTE, PROMPT
from rig.agents.task import CALLS
from rig.fake_engine import Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.vocabulary import END_OF_TURN, encode
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.cli_agents import HARNESSES
from stepwell.agents.rollout import RolloutStatus
from stepwell.steps.step import Step

TIMEOUT = 600.0
CHANNEL = "harness"


class ThinkingEngine(TaskEngine):
    def __init__(self, thinking: str) -> None:
        super().__init__()
        self.template = chat_templates.stripping
        self._thinking = thinking

    def next_replies(self, n: int) -> list[Reply | None]:
        replies = super().next_replies(n)
        return [reply and replace(reply, reasoning=self._thinking) for reply in replies]


def installed_harnesses() -> tuple[str, ...]:
    """None, if the environment of the agents is not there."""
    return () if installed_python("agents") is None else tuple(CALLS)


async def roll_out_harness(name: str, policy: ThinkingPolicy | None, thinking: str) -> list[Step]:
    """The steps of the task, without side calls."""
    async with ThinkingEngine(thinking) as engine:
        return await _do_task(name, policy, engine, engine.url)


async def roll_out_harness_on_vllm(name: str, policy: ThinkingPolicy | None, vllm: str) -> list[Step]:
    """The same on real vLLM with ScriptedSampling."""
    task = TaskEngine()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT)) as http,
        serve_proxy(TaskProxy(vllm, http, {}, task=task)) as url,
    ):
        return await _do_task(name, policy, task, url)


@dataclass
class TaskProxy(ScriptingProxy):
    """Tells vLLM to sample what the task says."""

    task: TaskEngine = field(kw_only=True)

    def scripted(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.task.reply_to(body) or Reply()
        text = reply.text + "".join(call.written() for call in reply.tool_calls)
        return {"vllm_xargs": {"script": [*encode(text), END_OF_TURN]}, "temperature": 0.0}


async def _do_task(name: str, policy: ThinkingPolicy | None, engine: TaskEngine, engine_url: str) -> list[Step]:
    pool, kind = LocalPool(), HARNESSES[name]
    async with serve_gateway(pool, [engine_url], bridge=policy, prompt_length=CONTEXT, response_length=1_000) as url:

        def prepare(sample: Mapping[str, Any], folder: Path) -> None:
            (note := folder / "note.txt").write_text(NOTE)
            engine.calls = tuple(CALLS[name](str(note)))

        harness = kind(lambda sample: PROMPT, prepare, lambda *of: 1.0, **installed(kind))
        async with BlackBoxAgentFlow(url, harness, channel=CHANNEL, group_size=1, timeout=TIMEOUT) as flow:
            result = await flow.rollout({}, name)
        if result.status is not RolloutStatus.COMPLETED:
            raise RuntimeError(f"{name}: {result.status}, {result.why}")
    steps = [step for step in pool.taken(CHANNEL) if not step.untrainable]
    if len(steps) != len(engine.calls) + 1:
        raise RuntimeError(f"{name}: {len(steps)} turns instead of {len(engine.calls) + 1}")
    return steps
