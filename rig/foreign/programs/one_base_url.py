"""Two episodes of verifiers with one base_url: `python one_base_url.py URL`, with the key in KEY, prints their ids."""

import asyncio
import json
import os
import sys

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

CONFIG = {"taskset": {"id": "shouting-v1"}, "agent": {"runtime": {"type": "subprocess"}}}


async def run() -> list[str]:
    answers, env = os.dup(1), load_environment(resolve_env_config(CONFIG))
    os.dup2(2, 1)
    context = ModelContext(model="tiny", client=EvalClientConfig(base_url=sys.argv[1], api_key_var="KEY"))
    async with env.serving():
        episodes = [await env.run_episode(task, context) for task in env.taskset]
    os.dup2(answers, 1)
    assert all(episode.ok for episode in episodes), [episode.errors for episode in episodes]
    return [trace.id for episode in episodes for trace in episode.traces]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(run())))
