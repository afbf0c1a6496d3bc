"""What the bridge brings and costs: rows and tokens of conversations with thinking and tools, and time per call.

- Rows: rollouts of 8 turns, two questions with three tool calls each, with a template that drops earlier thinking, and
  clients that do not send it back. By setting: rows of a rollout, trained tokens, and tokens that a trainer computes.
- Harnesses: the same figures for a task of four turns that Claude Code, Codex, OpenClaw, opencode and qwen-code do,
  each with its own tools and dialect (bridge_rig/harness_traffic.py), where they are installed (scripts/agent_envs.py).
- Time: the same calls with the bridge and without, in turns, to an engine in another process. The difference of the
  medians is what a bridged call costs. With --vllm the engine is real vLLM on a tiny model; its prefix cache is read.
  The harnesses then do their task on it, with the bridge.

    python -m benchmarks.bridge
    python -m benchmarks.bridge --vllm
"""

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from benchmarks.bridge_rig.harness_traffic import installed_harnesses, roll_out_harness, roll_out_harness_on_vllm
from benchmarks.report import report
from rig import chat_templates
from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.tiny_model import make_tiny_model
from rig.vllm_server import start_vllm
from rig.vocabulary import END_OF_TURN
from stepwell.steps.columns import pack
from stepwell.steps.rows import merge_rows
from stepwell.steps.step import Exactness, Step

ROLLOUTS, THINKING, RESULT = 8, "so I look at this first " * 8, "a line of a tool's output\n" * 8
TIMED_ROLLOUTS, TIMED_TURNS = 12, 8
HISTORY = 2_000
"""Characters of the first message of timed conversations; 900 on vLLM, whose window is small here."""
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
POLICIES: dict[str, ThinkingPolicy | None] = {"off": None, **{policy.value: policy for policy in ThinkingPolicy}}
LONG_CONTEXT = 131_072
LONG: dict[str, Any] = {
    "flags": (
        *("--max-model-len", str(LONG_CONTEXT), "--logits-processors", "stepwell_observed_sampling:ScriptedSampling"),
    ),
    "environment": {"OMP_NUM_THREADS": "2"},
}
"""vLLM for prompts of harnesses, in which a token is a byte."""
OF_HARNESSES = ("off", "template", "all")
"""`tool_cycle` is `all` for a task with one question."""


class Conversation:
    def __init__(self, http: aiohttp.ClientSession, path: str, **options: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self._http, self._path, self._options = http, path, options

    async def ask(self, *messages: dict[str, Any]) -> dict[str, Any]:
        self.messages += messages
        asked = {"model": "tiny", "messages": self.messages, **self._options}
        began = time.perf_counter()
        async with self._http.post(f"{self._path}/v1/chat/completions", json=asked) as answered:
            answer = await answered.json()
        self.seconds.append(time.perf_counter() - began)
        assert answered.status == 200, answer
        said: dict[str, Any] = answer["choices"][0]["message"]
        reply = {name: said[name] for name in ("role", "content", "tool_calls") if said.get(name) is not None}
        self.messages.append(reply)
        return reply


@asynccontextmanager
async def conversing(http: aiohttp.ClientSession, **options: Any) -> AsyncIterator[Conversation]:
    async with http.post("/init_trajectory", json={"channel": "asked"}) as opened:
        ref = await opened.json()
    path = f"/{ref['trajectory_uid']}/{ref['prompt_uid']}"
    yield Conversation(http, path, **options)
    async with http.post(f"{path}/v1/complete_trajectory", json={"reward": 1.0}) as ended:
        assert ended.status == 200


def thinking_replies() -> list[Reply]:
    """Of one rollout of 8 turns."""
    call = Reply("", (ToolCall("run", {"command": "ls", "in": {"folder": "src"}}),), reasoning=THINKING)
    return [call, call, call, Reply("It is done.", reasoning=THINKING)] * 2


async def roll_out(policy: ThinkingPolicy | None) -> list[list[Step]]:
    """The steps of each rollout."""
    pool = LocalPool()
    async with (
        FakeEngine(replies=thinking_replies() * ROLLOUTS, template=chat_templates.stripping) as engine,
        serve_gateway(pool, [engine.url], bridge=policy, prompt_length=30_000, response_length=1_000) as url,
        aiohttp.ClientSession(url) as http,
    ):
        for _ in range(ROLLOUTS):
            async with conversing(http, tools=TOOLS, max_tokens=1_000) as talk:
                for question in ("What is there?", "And then?"):
                    reply = await talk.ask({"role": "user", "content": question})
                    while calls := reply.get("tool_calls"):
                        answered = {"role": "tool", "tool_call_id": calls[0]["id"], "content": RESULT}
                        reply = await talk.ask(answered)
    return [pool.taken("asked") for _ in range(ROLLOUTS)]


def rows_and_tokens(rollouts: Sequence[Sequence[Step]], name: str) -> dict[str, float]:
    steps = [step for rollout in rollouts for step in rollout]
    trajectory_of_S = np.repeat(np.arange(len(rollouts)), [len(rollout) for rollout in rollouts])
    rows = merge_rows(pack(steps), trajectory_of_S, np.zeros(len(rollouts), np.int64))
    return {
        f"rows_per_rollout_{name}": len(rows.trajectory_of_R) / len(rollouts),
        f"trained_tokens_{name}": int(rows.loss_mask.sum()),
        f"computed_tokens_{name}": len(rows.tokens),
    }


async def run_harnesses() -> dict[str, float]:
    """One rollout of each, by setting."""
    figures: dict[str, float] = {}
    names = installed_harnesses()
    if not names:
        print("no harness was run: their environment is not installed (scripts/agent_envs.py)")
    for name in names:
        for setting in OF_HARNESSES:
            steps = await roll_out_harness(name, POLICIES[setting], THINKING)
            figures |= rows_and_tokens([steps], f"{name}_{setting}")
    return figures


async def time_calls(engine: str, options: dict[str, Any], history: int) -> dict[str, float]:
    """Milliseconds of calls that continue a conversation, without the bridge and with it, in turns."""
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    hits: dict[str, tuple[float, float]] = {"off": (0.0, 0.0), "on": (0.0, 0.0)}
    async with (
        serve_gateway(LocalPool(), [engine], prompt_length=30_000) as off,
        serve_gateway(LocalPool(), [engine], bridge=ThinkingPolicy.TEMPLATE, prompt_length=30_000) as on,
        aiohttp.ClientSession(off) as without,
        aiohttp.ClientSession(on) as bridged,
    ):
        for rollout in range(TIMED_ROLLOUTS + 1):
            for name, http in (("off", without), ("on", bridged)):
                before = await prefix_cache(engine)
                async with conversing(http, **options) as talk:
                    await talk.ask({"role": "user", "content": f"{name} {rollout} " + "word " * (history // 5)})
                    for turn in range(1, TIMED_TURNS):
                        await talk.ask({"role": "user", "content": f"Turn {turn}: and then?"})
                if rollout:  # the first one warms up, and probes the template
                    seconds[name] += talk.seconds[1:]
                    after = await prefix_cache(engine)
                    hits[name] = tuple(h + a - b for h, a, b in zip(hits[name], after, before, strict=True))  # type: ignore[assignment]
        async with bridged.get("/metrics") as shown:
            counted = re.search(r'stepwell_bridge_total\{outcome="bridged"\} (\S+)', await shown.text())
    median = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
    calls = (TIMED_ROLLOUTS + 1) * (TIMED_TURNS - 1)
    figures = {
        "ms_off_p50": median["off"],
        "ms_on_p50": median["on"],
        "added_ms_p50": median["on"] - median["off"],
        "bridged_share": float(counted[1]) / calls if counted else 0.0,
    }
    for name, (queries, hit) in hits.items():
        if queries:
            figures[f"prefix_cache_hit_rate_{name}"] = hit / queries
    return {key: round(value, 3) for key, value in figures.items()}


async def prefix_cache(engine: str) -> tuple[float, float]:
    """vLLM's counts of asked and of cached tokens; zeros for another engine."""
    async with aiohttp.ClientSession(engine) as http, http.get("/metrics") as shown:
        text = await shown.text() if shown.status == 200 else ""
    found = [re.search(rf"^vllm:prefix_cache_{name}_total\S* (\S+)", text, re.M) for name in ("queries", "hits")]
    queries, hits = (float(count[1]) if count else 0.0 for count in found)
    return queries, hits


@asynccontextmanager
async def fake_engine_process() -> AsyncIterator[str]:
    command = (sys.executable, "-m", "rig.fake_engine")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def run_fake() -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, policy in POLICIES.items():
        figures |= rows_and_tokens(await roll_out(policy), name)
    async with fake_engine_process() as engine:
        figures |= await time_calls(engine, {"max_tokens": 64}, HISTORY)
    return figures | await run_harnesses()


def run_vllm() -> dict[str, float]:
    """Every reply is the end of turn alone, so that the time is that of the prompts."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        with start_vllm(model, log=Path(folder) / "vllm.log") as server:
            options = {"max_tokens": 8, "allowed_token_ids": [END_OF_TURN]}
            figures = asyncio.run(time_calls(server.url, options, 900))
        model = make_tiny_model(Path(folder) / "long", context=LONG_CONTEXT)
        with start_vllm(model, log=Path(folder) / "long.log", **LONG) as server:
            return figures | asyncio.run(run_harnesses_on_vllm(server.url))


async def run_harnesses_on_vllm(vllm: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in installed_harnesses():
        before = await prefix_cache(vllm)
        steps = await roll_out_harness_on_vllm(name, ThinkingPolicy.TEMPLATE, vllm)
        queries, hits = (now - then for now, then in zip(await prefix_cache(vllm), before, strict=True))
        figures[f"rows_per_rollout_{name}"] = rows_and_tokens([steps], name)[f"rows_per_rollout_{name}"]
        figures[f"exact_steps_{name}"] = sum(step.exactness is Exactness.ENGINE for step in steps)
        figures[f"prefix_cache_hit_rate_{name}"] = round(hits / queries, 3)
        print(name, figures[f"rows_per_rollout_{name}"], figures[f"prefix_cache_hit_rate_{name}"], flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="time calls to real vLLM")
    if parser.parse_args().vllm:
        figures = run_vllm()
        most = {name: 1.0 for name in figures if name.startswith("rows_per_rollout_")}
        least = {name: 4.0 for name in figures if name.startswith("exact_steps_")}
        report(figures, at_most={"added_ms_p50": 3.0, **most}, at_least={"bridged_share": 1.0, **least})
    else:
        figures = asyncio.run(run_fake())
        most = {"rows_per_rollout_all": 1.0, "rows_per_rollout_tool_cycle": 2.0, "added_ms_p50": 3.0}
        most |= {name: 1.0 for name in figures if name.startswith("rows_per_rollout_") and name.endswith("_all")}
        report(figures, at_most=most, at_least={"bridged_share": 1.0})


if __name__ == "__main__":
    main()
