"""The steps of a rollout of a real harness, with the bridge or without.

The harness itself is run, unmodified, and not its recorded requests: what it sends back of a reply, and how, is what
the bridge depends on, and a recording of it would hold the prompts of other people's products. Gateway, bridge, pool
and flow are the real ones. A fake engine plays the model: it thinks before each reply, reads a file, edits it, runs a
command and answers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.environments import installed_python
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.harnesses import HARNESSES
from stepwell.agents.rollout import RolloutStatus
from stepwell.gateway.bridge.thinking import ThinkingPolicy
from stepwell.steps.step import Step
from tests.rig import chat_templates
from tests.rig.agents import TaskEngine, installed
from tests.rig.agents.engine import CONTEXT, NOTE, PROMPT
from tests.rig.agents.task import CALLS
from tests.rig.fake_engine import Reply
from tests.rig.gateways import serve_gateway
from tests.rig.local_pool import LocalPool

TIMEOUT = 300.0
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
    pool, kind = LocalPool(), HARNESSES[name]
    async with (
        ThinkingEngine(thinking) as engine,
        serve_gateway(pool, [engine.url], bridge=policy, prompt_length=CONTEXT, response_length=1_000) as url,
    ):

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
