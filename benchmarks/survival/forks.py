"""A trajectory that forks at each of its turns, as with a template that drops the thinking of earlier turns."""

import asyncio
import random
import time

import aiohttp

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome

TURNS, AGENTS = 5_000, 50
PAUSE = 1.0
"""Seconds between two calls of one of the other agents."""
FIRST_TOKENS, TURN_TOKENS = 20, 4
"""Of the prompt: at the first turn, and what each turn adds."""
VOCABULARY = 1_000
LONGEST = 32_768


class ForkingTrajectory:
    """All share one gateway and one shard, so that whatever the long trajectory holds up is seen."""

    name = "forks"
    fault = "a trajectory of 5,000 turns that forks at each of them, beside 50 agents"

    async def run(self, *, quick: bool) -> RowOutcome:
        turns, agents = (200, 5) if quick else (TURNS, AGENTS)
        auditor = Auditor()
        async with survival_cluster(gateway_flags={"prompt_length": LONGEST}) as cluster:
            load = AgentLoad(cluster.urls, auditor, pause=0.2 if quick else PAUSE)
            working = asyncio.create_task(load.run(agents))
            training = asyncio.create_task(auditor.follow(cluster.pool))
            await fork(cluster.urls[0], auditor, turns)
            forks = (await cluster.pool.stats()).forks
            load.stopped.set()
            await working
            await auditor.drain(cluster.pool)
            await training
        figures = auditor.figures() | {"forks": forks, "others_p99_delivery_s": auditor.delivery_p99(load.uids)}
        most = {"others_p99_delivery_s": 1.0, **NOTHING_LOST}
        return RowOutcome(figures, most, {"forks": turns - 1, "answered_percent": 100.0})


async def fork(gateway: str, auditor: Auditor, turns: int) -> None:
    """One turn after the other, as fast as they are answered. The next prompt has other tokens than the answer."""
    chance = random.Random(0)
    prompt = chance.choices(range(VOCABULARY), k=FIRST_TOKENS)
    async with aiohttp.ClientSession(gateway, raise_for_status=True) as http:
        async with http.post("/init_trajectory", json={}) as answer:
            opened = await answer.json()
        uid, path = opened["trajectory_uid"], f"/{opened['trajectory_uid']}/{opened['prompt_uid']}"
        for _ in range(turns):
            began = time.monotonic()
            body = {"model": "tiny", "prompt": prompt, "max_tokens": TURN_TOKENS}
            async with http.post(f"{path}/v1/completions", json=body) as answer:
                await answer.read()
            auditor.note_call(uid, True, time.monotonic() - began)
            prompt += chance.choices(range(VOCABULARY), k=TURN_TOKENS)
        auditor.ended_at[uid] = time.monotonic()
        async with http.post(f"{path}/complete_trajectory", json={"reward": 1.0}) as answer:
            await answer.read()
        auditor.completed.add(uid)
